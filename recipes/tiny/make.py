"""Make the built-in model: tokenizer, clean stage, mixture stage, shipped folder.

    python recipes/tiny/make.py --out DIR --seed 0 --threads 1

Owns: the order of the stages, the files in DIR, the manifest.
Never: touches the package; copying DIR/model to its place is a person's decision, after `accept.py`.
Promise: the same seed, machine, library versions and threads give the same weights, byte for byte.
"""

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from manifest import write_manifest
from pretrain import CLEAN_STAGE, MIXTURE_STAGE, Stage, fresh_model, train
from safetensors.torch import load_file, save_file
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3ForCausalLM

SAVE_EVERY = 1000  # steps between looks at unfinished weights

log = logging.getLogger("recipe")


def make(out: Path, seed: int, threads: int, steps_scale: float = 1.0, from_clean: bool = False) -> Path:
    """Run the recipe; the folder of the finished model."""
    torch.set_num_threads(threads)
    tokenizer = train_tokenizer(seed)
    clean_stage, mixture_stage = _scaled(CLEAN_STAGE, steps_scale), _scaled(MIXTURE_STAGE, steps_scale)
    model = fresh_model(seed)
    if from_clean:
        model.load_state_dict(load_file(out / "clean.safetensors"), strict=False)
    else:
        _run(model, tokenizer, clean_stage, seed, out)
        save_file(_weights(model), out / "clean.safetensors")
        export(model, tokenizer, out / "clean")
    _run(model, tokenizer, mixture_stage, seed, out)
    export(model, tokenizer, out / "model")
    manifest = write_manifest(out / "model", seed=seed, threads=threads, stages=(clean_stage, mixture_stage))
    log.info("weights sha256 %s", manifest["weights_sha256"])
    return out / "model"


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that `transformers` loads; the weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=0
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def _run(model: Qwen3ForCausalLM, tokenizer: Tokenizer, stage: Stage, seed: int, out: Path) -> None:
    def on_log(step: int) -> None:
        if step % SAVE_EVERY == 0:
            export(model, tokenizer, out / "unfinished")

    started = time.perf_counter()
    num_tokens = train(model, tokenizer, stage, seed, on_log)
    seconds = time.perf_counter() - started
    log.info("%s: %d steps, %d tokens, %.0f s", stage.name, stage.steps, num_tokens, seconds)


def _scaled(stage: Stage, steps_scale: float) -> Stage:
    return replace(stage, steps=max(1, round(stage.steps * steps_scale)))


def _weights(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The float32 state without the tied head."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Make the built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything the recipe writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="part of the recipe: other numbers, other weights")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="below 1: a short run, to compare checksums")
    parser.add_argument("--from-clean", action="store_true", help="reuse DIR/clean.safetensors; only the mixture runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    make(arguments.out, arguments.seed, arguments.threads, arguments.steps_scale, arguments.from_clean)


if __name__ == "__main__":
    main()
