"""The conversion of a model, recorded in its config: `save_pretrained` writes it, and `convert(model)` applies it again."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig

from ..config import Recipe, recipe_from_dict, recipe_to_dict

#: Attribute of the model's config. Transformers keeps attributes that it does not know, and acts on none of them.
RECORD = "torch_witcert"


class Conversion(NamedTuple):
    """The recipe of a model, and the indices of the attention layers that have it."""

    recipe: Recipe
    layers: tuple[int, ...]


def write_record(config: PreTrainedConfig, recipe: Recipe, layers: list[int]) -> None:
    setattr(config, RECORD, {"recipe": recipe_to_dict(recipe), "layers": sorted(layers)})


def read_record(config: PreTrainedConfig) -> Conversion | None:
    """What the config says, None where it says nothing.

    Raises:
        ValueError: it cannot be applied to a model with this config, or not by this version.
    """
    record = getattr(config, RECORD, None)
    if record is None:
        return None
    try:
        recipe, layers = recipe_from_dict(record["recipe"]), tuple(record["layers"])
        if not layers or not all(isinstance(layer, int) and 0 <= layer < config.num_hidden_layers for layer in layers):
            raise ValueError(f"layers must be some of 0 to {config.num_hidden_layers - 1}, got {record['layers']}")
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"model.config.{RECORD} cannot be applied ({type(error).__name__}: {error}): pass a recipe, which replaces it"
        ) from error
    return Conversion(recipe, layers)


def remove_record(config: PreTrainedConfig) -> None:
    config.__dict__.pop(RECORD, None)
