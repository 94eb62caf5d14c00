"""The trajectory server: scored groups in, exact batches out."""
