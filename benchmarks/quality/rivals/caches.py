"""The caches that are compared, each built as its package recommends.

Functions import their package themselves: each package is installed in an environment of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from protocol import Subject, held_bytes


@dataclass(frozen=True)
class Setting:
    """One row of the comparison.

    Attributes
    ----------
    name
        Printed; says what was called.
    nominal
        Bits that the package speaks of, keys and values.
    make
        Builds the cache for a model.
    """

    name: str
    nominal: str
    make: Callable[[Any], Subject]


@dataclass(frozen=True)
class Package:
    """A package and its settings.

    Attributes
    ----------
    requirement
        What pip installs; empty for what the host environment has.
    settings
        Rows, in order.
    pip_options
        More for pip.
    """

    requirement: str
    settings: tuple[Setting, ...]
    pip_options: tuple[str, ...] = ()


def dense() -> Package:
    """transformers' DynamicCache, the reference."""

    def make(model: Any) -> Subject:
        from transformers import DynamicCache

        return Subject(DynamicCache(config=model.config))

    return Package("", (Setting("DynamicCache", "32", make),))


def kvfold(formats: list[str], calibration: Callable[[Any], Any] = lambda model: None) -> Package:
    """kvfold's FoldedCache in an attached model, by the prompt alone or by what `calibration` makes of the model.

    "kvfold-4/sliding" folds layers with a sliding window, too.
    """

    def make(model: Any, name: str) -> Subject:
        import kvfold

        format, _, sliding = name.partition("/")
        kvfold.attach(model)
        policy = kvfold.Policy(format, sliding=sliding == "sliding")
        return Subject(kvfold.FoldedCache(model.config, policy=policy, calibration=calibration(model)))

    return Package("", tuple(Setting(name, "", lambda model, name=name: make(model, name)) for name in formats))


def kvarn() -> Package:
    """KVarN as kvfold folds it, with the same windows."""
    return kvfold(["kvarn-4", "kvarn-3", "kvarn-2"])


def oscar() -> Package:
    """OSCAR as kvfold folds it, with the same windows, calibrated on the end of the standard text."""

    @cache
    def calibration(model: Any) -> Any:
        from transformers import AutoTokenizer

        import kvfold
        from kvfold.evaluate import standard_text, text_passages

        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        return kvfold.calibrate(model, text_passages(tokenizer, standard_text()[-24_000:], 1_024, 4))

    return kvfold(["oscar-4", "oscar-3", "oscar-2"], calibration)


def turboquant_pro() -> Package:
    """Per-channel NF4 keys with 2 % outliers, PolarQuant values, NumPy arrays in lists, a dense window.

    Its layers need a patch: transformers has made `get_max_length` an abstract method since.
    """

    def make(model: Any, **options: Any) -> Subject:
        import turboquant_pro.hf_cache as hf_cache

        hf_cache.TurboQuantLayer.__abstractmethods__ = frozenset()
        return Subject(hf_cache.TurboQuantCache(**options))

    def setting(keys: int, values: int, **window: int) -> Setting:
        note = "".join(f", {name}={value}" for name, value in window.items())
        return Setting(
            f"TurboQuantCache(K{keys}V{values}{note})",
            f"{keys}/{values}",
            lambda model: make(model, key_bits=keys, value_bits=values, **window),
        )

    # Keys of fewer than 4 bits are refused (the rows say so), hence K4V3 and K4V2. A window of 512 is its default.
    refused = (setting(3, 3), setting(2, 2))
    small = (setting(4, values, hot_window=128) for values in (4, 3, 2))
    return Package("turboquant-pro==1.9.1", (setting(4, 4), *refused, *small))


def tiny_turboquant() -> Package:
    """KIVI: affine codes, keys by channel and values by token; 128 to 255 newest tokens dense."""

    def make(**options: Any) -> Subject:
        from tiny_turboquant import TinyKVCache

        return Subject(TinyKVCache(**options))

    return Package(
        "tiny-turboquant==0.18.0",
        (
            *(Setting(f"TinyKVCache(bits={b})", f"{b}/{b}", lambda model, b=b: make(bits=b)) for b in (4, 3, 2)),
            Setting('TinyKVCache("aggressive")', "3/2", lambda model: make(compression="aggressive")),
        ),
    )


def turboquant_vllm() -> Package:
    """TurboQuant codes in a wrapped DynamicCache, and beside them a dense copy of what they unfold to."""

    def make(model: Any, bits: int) -> Subject:
        from transformers import DynamicCache
        from turboquant_vllm import CompressedDynamicCache

        cache = DynamicCache()
        wrapper = CompressedDynamicCache(cache, head_dim=model.config.head_dim, k_bits=bits, v_bits=bits)

        # Its fused kernels for CUDA do without the dense copy.
        def codes() -> int:
            return held_bytes(
                wrapper._compressed_keys, wrapper._compressed_values,
                wrapper._key_compressors, wrapper._value_compressors,
            )  # fmt: skip

        return Subject(cache, (cache, wrapper), at_best=codes)

    # Its metadata asks for Python 3.12, its code runs on 3.11.
    return Package(
        "turboquant-vllm==1.5.0",
        tuple(
            Setting(f"CompressedDynamicCache({b})", f"{b}/{b}", lambda model, b=b: make(model, b)) for b in (4, 3, 2)
        ),
        ("--ignore-requires-python",),
    )


def tqai() -> Package:
    """TurboQuant codes that are unfolded at once: by default the cache holds what they unfold to, and no codes."""

    def make(model: Any, bits: int) -> Subject:
        import torch
        import tqai

        cache = tqai.patch(model, bits_k=bits, bits_v=bits, backend="torch", device="cpu")

        # Its strategy "full" keeps codes alone, with the same predictions, and unfolds all of them at every step.
        def codes() -> int:
            quantizers = [*cache._key_quantizers.values(), *cache._value_quantizers.values()]
            vectors = cache.get_seq_length() * model.config.num_key_value_heads
            code = [held_bytes(q.quantize(torch.ones(1, q.head_dim))) for q in quantizers]
            return vectors * sum(code) + held_bytes(quantizers)

        return Subject(cache, at_best=codes)

    return Package(
        "tqai==0.6.1",
        tuple(Setting(f"patch({b}, {b})", f"{b}/{b}", lambda model, b=b: make(model, b)) for b in (4, 3, 2)),
    )


def turbo_attn() -> Package:
    """The codec alone: attention reads its round trip, and the bytes are those of what `compress` returns.

    Its tables are left out, to its favour. It has no cache for transformers; its engines for CUDA serve it calibrated,
    so its own calibrator, fed the first 512 tokens, makes a second row.
    """

    def make(model: Any, bits: int, calibrated: bool) -> Subject:
        from tkv import OnlineCalibrator, TkvCodec
        from transformers import DynamicCache

        config = model.config
        calibrator = OnlineCalibrator(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, bit_width=bits
        )

        class RoundTripCache(DynamicCache):
            def __init__(self) -> None:
                super().__init__(config=config)
                self.codecs: dict[int, TkvCodec] = {}
                self.codes: list[Any] = []

            def codec(self, layer: int, keys: Any, values: Any) -> TkvCodec:
                if layer not in self.codecs:
                    codec = self.codecs[layer] = TkvCodec(head_dim=config.head_dim, bit_width=bits)
                    if calibrated:
                        first = (x[0, :, :512].transpose(0, 1) for x in (keys, values))
                        calibrator.collect_for_codec(layer, *first, codec)
                        codec.k_centroids, codec.k_boundaries, codec.v_centroids, codec.v_boundaries = (
                            calibrator.optimize(layer)
                        )
                return self.codecs[layer]

            def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[no-untyped-def]
                codec = self.codec(layer_idx, key_states, value_states)
                keys, values = codec.compress_k(key_states), codec.compress_v(value_states)
                self.codes += [keys, values]
                return super().update(
                    codec.decompress_k(*keys), codec.decompress_v(*values), layer_idx, *args, **kwargs
                )

        cache = RoundTripCache()
        return Subject(cache, (cache.codes,))

    return Package(
        "turbo-attn==0.70.1",
        tuple(
            Setting(
                f"TkvCodec({b}{', calibrated' * calibrated})",
                f"{b}/{b}",
                lambda model, b=b, calibrated=calibrated: make(model, b, calibrated),
            )
            for calibrated in (False, True)
            for b in (4, 3, 2)
        ),
    )


RIVALS: dict[str, Callable[[], Package]] = {
    "kvarn": kvarn,
    "oscar": oscar,
    "turboquant-pro": turboquant_pro,
    "tiny-turboquant": tiny_turboquant,
    "turboquant-vllm": turboquant_vllm,
    "tqai": tqai,
    "turbo-attn": turbo_attn,
}


def package(name: str, formats: list[str]) -> Package:
    """The package called `name`: "dense", "kvfold" or a rival."""
    if name == "dense":
        return dense()
    return kvfold(formats) if name == "kvfold" else RIVALS[name]()
