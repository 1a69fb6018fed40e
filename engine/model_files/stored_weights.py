"""The `quantization_config` of a checkpoint.

Tensor shapes determine bits and groups; this has the rest.
"""

from dataclasses import dataclass

from engine.model_files.fields import Fields

REMEDY = "take a checkpoint in bf16, or one of fp8, AWQ, GPTQ or compressed-tensors (int or float of 8 bits, packed int of 4 or 8)"
_COMPRESSED = ("int-quantized", "float-quantized", "pack-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Packing:
    """Integers of `bits`, scales per `group` of inputs (0: per row), maybe offsets."""

    bits: int
    group: int
    offsets: bool

    def size_bytes(self, outputs: int, inputs: int) -> int:
        """Scales and offsets are fp32."""
        groups = -(-inputs // self.group) if self.group else 1
        return outputs * inputs * self.bits // 8 + 4 * outputs * groups * (1 + self.offsets)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`layout`: "fp8", "awq", "gptq" or "compressed". `bits`: of packed integers (awq, gptq).
    `zeros_less_one`: zero points are stored minus 1 (GPTQ v1). `packing`: set if weights stay
    integers.
    """

    layout: str
    bits: int = 8
    zeros_less_one: bool = False
    packing: Packing | None = None

    def __str__(self) -> str:
        return f"{self.layout}{self.bits}"


def read_stored_weights(fields: Fields, *, mxfp4: bool) -> StoredWeights | None:
    """None for float weights or MXFP4 experts. Raises ConfigError if unsupported."""
    if not fields.get("quantization_config"):
        return None
    config = fields.inside("quantization_config")
    method = config.text("quant_method", default="")
    if mxfp4 and method == "mxfp4":
        return None
    if method not in _READERS:
        raise fields.error("quantization_config", f"quant_method {method or 'none'!r} is not supported; {REMEDY}")
    return _READERS[method](config)


def _fp8(config: Fields) -> StoredWeights:
    kind = config.text("fmt", default="e4m3")
    if kind != "e4m3":
        raise config.error("fmt", f"{kind} is not supported, only e4m3 is; {REMEDY}")
    return StoredWeights("fp8")


def _awq(config: Fields) -> StoredWeights:
    bits = config.count("bits" if config.get("bits") is not None else "w_bit")
    version = config.text("version", default="gemm")
    if bits != 4:
        raise config.error("bits", f"AWQ of {bits} bits is not supported, only of 4; {REMEDY}")
    if version.lower() != "gemm":
        raise config.error("version", f"the packing {version} is not supported, only gemm is; {REMEDY}")
    group = _group(config, "group_size" if config.get("group_size") is not None else "q_group_size")
    return StoredWeights("awq", 4, packing=Packing(4, group, config.flag("zero_point", default=True)))


def _gptq(config: Fields) -> StoredWeights:
    bits, packing = config.count("bits"), config.text("checkpoint_format", default="gptq")
    if bits not in (4, 8):
        raise config.error("bits", f"GPTQ of {bits} bits is not supported, only of 4 and 8; {REMEDY}")
    if packing not in ("gptq", "gptq_v2"):
        raise config.error("checkpoint_format", f"{packing} is not supported, only gptq and gptq_v2 are; {REMEDY}")
    own = Packing(bits, _group(config, "group_size"), not config.flag("sym", default=True))
    by_activation = config.flag("desc_act", default=False)
    return StoredWeights("gptq", bits, zeros_less_one=packing == "gptq", packing=None if by_activation else own)


def _compressed(config: Fields) -> StoredWeights:
    form = config.text("format", default="")
    if form not in _COMPRESSED:
        raise config.error("format", f"{form or 'none'} is not supported, only {', '.join(_COMPRESSED)} are; {REMEDY}")
    groups, bits, packing = config.inside("config_groups"), set(), None
    for name in groups.names():
        weights = groups.inside(name).inside("weights")
        kind, size = weights.text("type", default="int"), weights.count("num_bits")
        if (kind, size) not in (("int", 4), ("int", 8), ("float", 8)) or (size == 4 and form != "pack-quantized"):
            raise weights.error("num_bits", f"{kind} of {size} bits as {form} is not supported; {REMEDY}")
        bits.add(size)
        if kind == "int":
            packing = Packing(size, _group(weights, "group_size"), not weights.flag("symmetric", default=True))
    if len(bits) != 1:
        raise config.error("config_groups", f"must have weights of one size, has {len(bits)}; {REMEDY}")
    return StoredWeights("compressed", bits.pop(), packing=packing)


def _group(config: Fields, name: str) -> int:
    return 0 if config.get(name) in (None, -1) else config.count(name)


_READERS = {"fp8": _fp8, "fbgemm_fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
