"""Names of formats and radii, what is refused and how, and the checks that the operators make of their arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from torch_witcert.ops import certified_attention, kv_write
from torch_witcert.ops.formats import (
    DEFAULT,
    DITHERS,
    KEY_ELEMENTS,
    KEY_SCALINGS,
    MOST_OUTLIER_PAIRS,
    VALUE_ELEMENTS,
    KeyFormat,
    StoreFormat,
    ValueFormat,
)
from torch_witcert.ops.radii import DETERMINISTIC, Radii, parse_radii
from torch_witcert.ops.storage import PagedStore, StoreShape, identity_page_table
from torch_witcert.testing.generators import KEY_FORMATS, VALUE_FORMATS

DITHERED = StoreFormat(KeyFormat(dither="stream"), ValueFormat())


class TestNames:
    def test_of_the_default(self):
        assert DEFAULT.name == "int8/asymmetric/0/none+int8/none"
        assert StoreFormat.parse(DEFAULT.name) == StoreFormat() == DEFAULT

    def test_round_trip(self):
        formats = [StoreFormat(key, value) for key, value in product(KEY_FORMATS, VALUE_FORMATS)]
        assert len({store_format.name for store_format in formats}) == len(formats)
        for store_format in formats:
            assert StoreFormat.parse(store_format.name) == store_format

    def test_outlier_pairs_round_trip(self):
        for pairs in range(MOST_OUTLIER_PAIRS + 1):
            store_format = StoreFormat(KeyFormat(outlier_pairs=pairs))
            assert StoreFormat.parse(store_format.name) == store_format

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "int8",
            "int8/asymmetric/0/none",
            "int8/asymmetric/0+int8/none",
            "int8/asymmetric/0/none+int8/none+int8/none",
            "int8/asymmetric/0/none+int8/none/0",
            "int8/asymmetric/zero/none+int8/none",
            "int8/asymmetric/17/none+int8/none",
            "int9/asymmetric/0/none+int8/none",
            "int8/asymmetric/0/none+int2/none",
        ],
    )
    def test_of_no_format(self, name):
        with pytest.raises(ValueError, match="store_format must be the name of a StoreFormat") as caught:
            StoreFormat.parse(name)
        assert repr(name) in str(caught.value) and DEFAULT.name in str(caught.value)

    def test_of_a_combination_that_is_not_supported(self):
        with pytest.raises(NotImplementedError, match="key element .fp8. is supported"):
            StoreFormat.parse("fp8/asymmetric/0/none+int8/none")


class TestRefusals:
    @pytest.mark.parametrize("field", ["element", "scaling", "dither"])
    @pytest.mark.parametrize("value", ["int5", "", None, 8])
    def test_unknown_key_choices(self, field, value):
        with pytest.raises(ValueError, match=f"key {field} must be one of") as caught:
            KeyFormat(**{field: value})
        assert repr(value) in str(caught.value)

    @pytest.mark.parametrize("field", ["element", "dither"])
    @pytest.mark.parametrize("value", ["int6", "", None, 8])
    def test_unknown_value_choices(self, field, value):
        with pytest.raises(ValueError, match=f"value {field} must be one of") as caught:
            ValueFormat(**{field: value})
        assert repr(value) in str(caught.value)

    @pytest.mark.parametrize("pairs", [-1, MOST_OUTLIER_PAIRS + 1, 1.0, True, "2", None])
    def test_outlier_pairs(self, pairs):
        with pytest.raises(ValueError, match="outlier_pairs must be an int in") as caught:
            KeyFormat(outlier_pairs=pairs)
        assert repr(pairs) in str(caught.value)

    def test_which_keys_are_supported(self):
        """Everything but fp8 with a zero, per token or with dither."""
        for element, scaling, dither in product(KEY_ELEMENTS, KEY_SCALINGS, DITHERS):
            if element != "fp8" or (scaling, dither) == ("symmetric", "none"):
                assert KeyFormat(element, scaling, dither=dither) in KEY_FORMATS
                continue
            with pytest.raises(NotImplementedError, match="key element .fp8. is supported") as caught:
                KeyFormat(element, scaling, dither=dither)
            assert all(part in str(caught.value) for part in ("scaling", "dither", repr(scaling), repr(dither)))

    def test_which_values_are_supported(self):
        """Dither with int8 only."""
        for element, dither in product(VALUE_ELEMENTS, DITHERS):
            if element == "int8" or dither == "none":
                assert ValueFormat(element, dither) in VALUE_FORMATS
                continue
            with pytest.raises(NotImplementedError, match="dithered values must be int8") as caught:
                ValueFormat(element, dither)
            assert repr(element) in str(caught.value) and repr(dither) in str(caught.value)

    def test_scales_per_token_need_whole_groups_of_channels(self):
        key = KeyFormat(scaling="token")
        for head_dim in (64, 96, 128, 256):
            key.check_head_dim(head_dim)
        with pytest.raises(NotImplementedError, match="scaling 'token'.*head_dim.*80"):
            key.check_head_dim(80)
        with pytest.raises(NotImplementedError, match="head_dim"):
            StoreShape(1, 1, 1, 16, 80, torch.float32, StoreFormat(key))

    def test_outlier_pairs_that_are_all_channels(self):
        with pytest.raises(NotImplementedError, match="16 outlier pairs.*head_dim 32"):
            KeyFormat(outlier_pairs=16).check_head_dim(32)
        KeyFormat(outlier_pairs=15).check_head_dim(32)


class TestRadii:
    def test_names_round_trip(self):
        for kinds in product((False, True), repeat=3):
            radii = Radii(*kinds)
            if any(radii):
                assert parse_radii(radii.name, DITHERED) == radii

    def test_order_does_not_matter(self):
        assert parse_radii("residual+step", DEFAULT) == DETERMINISTIC

    @pytest.mark.parametrize("name", ["", "steps", "step+", "step+step", "step,residual"])
    def test_of_no_kind(self, name):
        with pytest.raises(ValueError, match="radii must be some of") as caught:
            parse_radii(name, DITHERED)
        assert repr(name) in str(caught.value)

    @pytest.mark.parametrize("name", ["probabilistic", "step+probabilistic"])
    def test_probabilistic_radii_need_dithered_keys(self, name):
        for mode in ("stream", "tile"):
            assert parse_radii(name, StoreFormat(KeyFormat(dither=mode))).probabilistic
        for store_format in (DEFAULT, StoreFormat(value=ValueFormat(dither="stream"))):
            with pytest.raises(NotImplementedError, match="probabilistic radii need dithered keys"):
                parse_radii(name, store_format)


B, HKV, GROUP, P, D, M, T = 2, 2, 3, 16, 64, 3, 4
#: Has every part of a store but one: exact values need no scale.
FULL = StoreFormat(KeyFormat("int6", outlier_pairs=2, dither="stream"), ValueFormat("int4"))
NUMBERS = {"sm_scale": 0.125, "window": 0, "softcap": 0.0, "pages_per_split": 8, "layer": 0}


def write_arguments(store_format: StoreFormat = FULL) -> dict:
    store = StoreShape(B, M, HKV, P, D, torch.float32, store_format).allocate("cpu")
    pairs = store_format.key.outlier_pairs
    channels = torch.arange(2 * pairs, dtype=torch.int32).expand(HKV, -1).contiguous()
    return {
        "k": torch.zeros(B, HKV, T, D),
        "v": torch.zeros(B, HKV, T, D),
        "columns": torch.arange(T, dtype=torch.int32).expand(B, -1).contiguous(),
        "lengths": torch.zeros(B, dtype=torch.int32),
        "counts": torch.zeros(B, dtype=torch.int32),
        "page_table": identity_page_table(B, M, "cpu"),
        "seeds": torch.zeros(B if store_format.is_dithered else 0, dtype=torch.int64),
        "outlier_channels": channels if pairs else torch.empty(0, dtype=torch.int32),
        **store._asdict(),
        "layer": 0,
        "store_format": store_format.name,
    }


def attention_arguments(store_format: StoreFormat = FULL, radii: str = "step+residual+probabilistic") -> dict:
    written = write_arguments(store_format)
    probabilistic = parse_radii(radii, store_format).probabilistic
    state = {name: written[name] for name in ("lengths", "page_table")}
    return {
        "q": torch.zeros(B, HKV * GROUP, T, D),
        "k": written["k"],
        "v": written["v"],
        "positions": torch.arange(T, dtype=torch.int32).expand(B, -1).contiguous(),
        **state,
        "source_map": torch.zeros(B, HKV, M, dtype=torch.int8),
        "log_risk": torch.full((B, T) if probabilistic else (0,), 10.0),
        "sinks": torch.zeros(HKV * GROUP),
        "outlier_channels": written["outlier_channels"],
        **{name: written[name] for name in PagedStore._fields},
        **NUMBERS,
        "radii": radii,
        "store_format": store_format.name,
    }


WRITE_TENSORS = [name for name, part in write_arguments().items() if isinstance(part, torch.Tensor)]
ATTENTION_TENSORS = [name for name, part in attention_arguments().items() if isinstance(part, torch.Tensor)]


class TestOperators:
    """What the operators refuse; what they accept is in every other test."""

    def test_the_arguments_below_are_accepted(self):
        for key, value in product(KEY_FORMATS, VALUE_FORMATS):
            store_format = StoreFormat(key, value)
            kv_write(**write_arguments(store_format))
            certified_attention(**attention_arguments(store_format, "step"))
        out, _, _ = certified_attention(**attention_arguments())
        assert (out == 0).all()
        certified_attention(**(attention_arguments() | {"sinks": torch.empty(0)}))

    @pytest.mark.parametrize("name", WRITE_TENSORS)
    def test_write_refuses_another_shape_or_dtype(self, name):
        for wrong in self.wrong(name, write_arguments()[name]):
            with pytest.raises((ValueError, NotImplementedError), match=self.named(name)):
                kv_write(**(write_arguments() | {name: wrong}))

    @pytest.mark.parametrize("name", ATTENTION_TENSORS)
    def test_attention_refuses_another_shape_or_dtype(self, name):
        for wrong in self.wrong(name, attention_arguments()[name]):
            with pytest.raises((ValueError, NotImplementedError), match=self.named(name)):
                certified_attention(**(attention_arguments() | {name: wrong}))

    @staticmethod
    def wrong(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        other = torch.float64 if tensor.is_floating_point() else torch.int16
        result = [tensor[None], tensor.to(other)]
        if name != "page_table":  # it says how many page slots there are
            result.append(torch.cat([tensor, tensor[..., :1]], -1))
        if name != "sinks":  # none are allowed
            result.append(tensor.flatten()[:0])
        return result

    @staticmethod
    def named(name: str) -> str:
        """Other tensors are held against k and k_tail, so that a wrong one of these two may show in another."""
        return {"k": "k |of k|head_dim", "k_tail": "k_tail", "q": "q |query"}.get(name, f"^{name} ")

    @pytest.mark.parametrize("name", [name for name in PagedStore._fields if name != "page_keys"])
    def test_a_store_must_be_contiguous(self, name):
        tensor = write_arguments()[name]
        strided = tensor.repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(ValueError, match=f"{name} must be contiguous"):
            kv_write(**(write_arguments() | {name: strided}))

    def test_a_store_of_another_format_is_refused(self):
        other = replace(FULL, key=replace(FULL.key, element="int4"))
        with pytest.raises(ValueError, match="k_codes must have shape"):
            kv_write(**(write_arguments() | {"store_format": other.name}))
        with pytest.raises(ValueError, match="v_codes must have shape"):
            certified_attention(**(attention_arguments() | {"store_format": replace(FULL, value=DEFAULT.value).name}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sm_scale", 0.0),
            ("sm_scale", float("inf")),
            ("sm_scale", float("nan")),
            ("softcap", -1.0),
            ("softcap", float("inf")),
            ("softcap", float("nan")),
            ("window", -1),
            ("window", 2**31),
            ("pages_per_split", 0),
            ("layer", -1),
            ("radii", "steps"),
            ("store_format", "int8"),
        ],
    )
    def test_numbers_and_names(self, name, value):
        with pytest.raises(ValueError, match=name):
            certified_attention(**(attention_arguments() | {name: value}))

    def test_what_a_format_does_not_need_must_be_empty(self):
        for name, tensor in (
            ("log_risk", torch.zeros(B, T)),
            ("outlier_channels", torch.zeros(HKV, 4, dtype=torch.int32)),
            ("page_keys", torch.zeros(B * M, HKV, dtype=torch.int64)),
            ("v_zero", torch.zeros(B * M, HKV, P, 4)),
        ):
            with pytest.raises(ValueError, match=name):
                certified_attention(**(attention_arguments(DEFAULT, "step") | {name: tensor}))
        with pytest.raises(ValueError, match="seeds"):
            kv_write(**(write_arguments(DEFAULT) | {"seeds": torch.zeros(B, dtype=torch.int64)}))

    def test_probabilistic_radii_over_plain_keys_are_refused(self):
        with pytest.raises(NotImplementedError, match="probabilistic radii need dithered keys"):
            certified_attention(**(attention_arguments(DEFAULT, "step") | {"radii": "probabilistic"}))

    def test_head_dim_that_does_not_fit_the_scaling(self):
        by_token = StoreFormat(KeyFormat(scaling="token"))
        arguments = write_arguments(by_token)
        narrow = {name: arguments[name][..., :16].repeat(1, 1, 1, 5) for name in ("k", "v")}
        with pytest.raises(NotImplementedError, match="head_dim"):
            kv_write(**(arguments | narrow))
