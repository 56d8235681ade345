"""`convert` puts certified attention modules into a model, `restore` takes them out again."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from transformers import PreTrainedModel

from ..config import CertifiedInt8Config, Recipe
from ..ops.storage import HEAD_DIMS, MODEL_DTYPES
from .attention import IMPLEMENTATION, CertifiedAttention
from .compatibility import check_versions
from .families import CERTIFIED_CLASSES
from .generation import CachePreparation
from .outliers import check_outlier_indices
from .record import RECORD, read_record, remove_record, write_record
from .supported import MODEL_TYPES, attention_modules, check_every_layer, check_pretrained

#: Attribute of a converted model: why attention modules were left dense, by name.
LEFT_DENSE = "_torch_witcert_left_dense"


def convert(
    model: PreTrainedModel,
    config: Recipe | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    strict: bool = True,
) -> PreTrainedModel:
    """Put a certified attention module in the place of every attention module of `model`, in place.

    Weights, names and `state_dict` stay as they are. `model.generate()` then makes a
    :class:`~torch_witcert.CertifiedCache` by itself; forwards of your own take one as their cache argument.

    `model.config.torch_witcert` records the recipe and the converted layers. `save_pretrained` writes it beside the weights, which
    load as a plain model; `convert(model)` on the model that `from_pretrained` gives then converts the same layers again.

    Args:
        model: Llama, Qwen2, Qwen3, Mistral, Phi3, Gemma2 or GptOss from transformers, in bfloat16, float16 or float32, on one device.
        config: recipe, a `CertifiedInt8Config` or a `WitCertConfig`. Where left out, the one that `model.config` records, else
            `CertifiedInt8Config()`.
        filter_fn: `filter_fn(module, name)` says which attention modules to convert. Where left out, all; or, where `config` is left
            out as well, those that `model.config` records.
        strict: refuse if any attention module is left out that the record does not leave out too. With False such modules read an
            exact cache, which `report(model)` shows as dense.

    Returns:
        The same model.

    Raises:
        ValueError: naming what is not supported, or what in the record is wrong; the model is then as it was.
        NotImplementedError: a layer has no attention module of a supported class, `strict` or not.
        TypeError: `config` is not a recipe, or `model` no model of transformers.
    """
    check_versions()
    if config is not None and not isinstance(config, Recipe):
        found = f"the class {config.__name__}: call it" if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config must be a recipe like CertifiedInt8Config(), got {found}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function of (module, name) or None, got {type(filter_fn).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    _check_model(model)
    check_every_layer(model)
    record = read_record(model.config) if config is None else None
    config = config or (record.recipe if record else CertifiedInt8Config())
    layers = record.layers if record and filter_fn is None else None
    chosen, left_dense, recorded_dense = [], {}, {}
    for name, module in attention_modules(model):
        if layers is not None and module.layer_idx not in layers:
            recorded_dense[name] = f"left out by model.config.{RECORD}"
        elif filter_fn is not None and not filter_fn(module, name):
            left_dense[name] = "left out by filter_fn"
        elif reason := _why_not(module, config):
            left_dense[name] = reason
        else:
            chosen.append(name)
    if not chosen:
        raise ValueError(
            f"no attention module of model ({type(model).__name__}) can be converted: {_by_reason(left_dense)}"
        )
    if strict and left_dense:
        raise ValueError(
            f"strict=True refuses to leave attention modules dense: {_by_reason(left_dense)}. Pass strict=False to allow it"
        )
    check_outlier_indices(config, [model.get_submodule(name) for name in chosen])
    replaced = [(name, _replacement(model.get_submodule(name), config)) for name in chosen]
    write_record(model.config, config, [module.layer_idx for _, module in replaced])
    for name, module in replaced:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    model.config._attn_implementation = IMPLEMENTATION
    setattr(model, LEFT_DENSE, recorded_dense | left_dense)
    model._prepare_cache_for_generation = CachePreparation(model, config)
    return model


def certify_module(module: nn.Module, config: Recipe) -> CertifiedAttention:
    """Certified module that shares everything with `module`; what `torchao.quantization.quantize_` calls.

    The config of the module, which a whole model shares, then names our attention implementation, and records the layer.

    Args:
        module: an attention module of a supported family.
        config: recipe.

    Raises:
        ValueError: the module cannot be converted, with the reason.
        NotImplementedError: another module of the model has another recipe.
    """
    check_versions()
    if reason := _why_not(module, config):
        raise ValueError(
            f"module {type(module).__name__} cannot be converted: {reason}. With torchao's quantize_ pass a filter_fn that chooses "
            "attention modules, or use torch_witcert.convert(model)"
        )
    # Of an earlier module; a record from a checkpoint, whose model is not converted yet, is replaced.
    record = read_record(module.config) if module.config._attn_implementation == IMPLEMENTATION else None
    if record and record.recipe != config:
        raise NotImplementedError(
            f"layer {module.layer_idx} cannot be converted with {config}: a model has one recipe for all certified layers, and "
            f"layers {list(record.layers)} have {record.recipe}"
        )
    certified = _replacement(module, config)
    write_record(module.config, config, [*(record.layers if record else ()), module.layer_idx])
    module.config._attn_implementation = IMPLEMENTATION
    return certified


def _replacement(module: nn.Module, config: Recipe) -> CertifiedAttention:
    return CERTIFIED_CLASSES[type(module)].replacing(module, config)


def restore(model: nn.Module) -> nn.Module:
    """Put the very same original modules back and remove every trace of the conversion, its record in the config included.

    Raises:
        ValueError: the model is not converted.
        TypeError: `model` is no model of transformers.
    """
    certified = [(name, module) for name, module in attention_modules(model) if isinstance(module, CertifiedAttention)]
    if not certified:
        raise ValueError(f"model ({type(model).__name__}) is not converted: there is nothing to restore")
    for name, module in certified:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.release())
        remove_record(module.config)
        if module.original_implementation is not None:
            module.config._attn_implementation = module.original_implementation
    # A compiled call was made while the model was converted, because convert() refuses compiled models.
    for attribute in (LEFT_DENSE, "_prepare_cache_for_generation", "_compiled_call", "_last_compile_config"):
        model.__dict__.pop(attribute, None)
    return model


def _by_reason(left_dense: dict[str, str]) -> str:
    """Names of modules, listed once for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in left_dense.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(
        f"{found[0] if len(found) == 1 else f'{len(found)} modules, {found[0]} to {found[-1]}'}: {reason}"
        for reason, found in names.items()
    )


def _check_model(model: PreTrainedModel) -> None:
    if isinstance(model, nn.Module) and any(isinstance(part, OptimizedModule) for part in model.modules()):
        raise ValueError(
            "model is already compiled by torch.compile: call convert() on the model first, then compile it"
        )
    check_pretrained(model)
    if getattr(model.config, "model_type", None) not in MODEL_TYPES:
        raise ValueError(
            f"model type {getattr(model.config, 'model_type', None)!r} ({type(model).__name__}) is not supported; supported: "
            f"{', '.join(MODEL_TYPES)}"
        )
    if any(isinstance(module, CertifiedAttention) for module in model.modules()):
        raise ValueError("model is already converted: call torch_witcert.restore(model) first to convert it anew")
    compiled = [name or "itself" for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled:
        raise ValueError(f"model is already compiled ({', '.join(compiled)}): convert a model before it is compiled")
    if getattr(model, "_compiled_call", None) is not None:
        raise ValueError(
            "model is already compiled (by generate()): convert a model before it generates with a static cache, or "
            "`del model._compiled_call`"
        )
    if not getattr(model.config, "is_causal", True):
        raise ValueError("model.config.is_causal is False: only causal attention is supported")
    if (tp_size := getattr(model, "tp_size", None)) is not None and tp_size > 1:
        raise NotImplementedError(f"tensor parallelism over {tp_size} devices is not supported")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"the parameters of model must be on one device and loaded, got devices {sorted(devices)}: load the model without "
            "offloading, for example with device_map=None and model.to(device)"
        )
    if model.dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype of model must be one of {MODEL_DTYPES}, got {model.dtype}")


def _why_not(module: nn.Module, config: Recipe) -> str | None:
    """Why an attention module cannot be converted; None where it can."""
    if isinstance(module, CertifiedAttention):
        return "it is already converted; call torch_witcert.restore(model) first"
    if type(module) not in CERTIFIED_CLASSES:
        supported = ", ".join(cls.__name__ for cls in CERTIFIED_CLASSES)
        return f"attention class {type(module).__name__} is not supported; supported: {supported}"
    if "forward" in module.__dict__:
        return (
            "its forward is replaced on the instance (by accelerate's hooks or a monkey patch), and the replacement would be "
            "bound to the old module; remove the hooks first (accelerate.hooks.remove_hook_from_module)"
        )
    if module.head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {module.head_dim}"
    try:
        config.store_format.key.check_head_dim(module.head_dim)
    except NotImplementedError as error:
        return f"{type(config).__name__}: {error}"
    return None
