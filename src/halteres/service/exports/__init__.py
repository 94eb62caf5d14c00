"""Weights as files for others: PEFT and merged folders, encryption, signed downloads."""
