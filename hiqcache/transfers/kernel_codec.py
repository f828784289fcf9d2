"""Codec arithmetic in Triton: rows to codes and scales, codes to rows.

A few lines of PTX stand where Triton would make several times as many instructions, each beside the
plain Triton that gives the same bits and runs in the interpreter. They take compute capability 8.0.
"""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_CODE_MAX = tl.constexpr(127.0)
_FLOAT_INF_BITS = tl.constexpr(0x7F800000)
BF16_NAN_BITS = tl.constexpr(0x7FC0)
# Adding 384 = 1.5 * 2^8 rounds a quotient to a multiple of 2^-15, adding 1.5 * 2^23 to an integer.
SNAP = tl.constexpr(384.0)
ROUND = tl.constexpr(12582912.0 - 384.0)


@triton.jit
def quantise(values, SCALE_MIN_BITS: tl.constexpr, ROTATE: tl.constexpr):
    """fp32 [ROWS, DIM] to int8 codes and the bits of bf16 scales: codecs.int8.quantise, bit by bit.

    Why a product with the reciprocal gives the same codes as the reference's rounded quotient, for
    values of bf16 or fp16 (codec int8). With x and s of at most 11 and 8 significant bits and
    |x / s| >= 0.49, x / s is either a tie k + 1/2 or at least 2^-13 away from one, as 2x - (2k+1)s
    is a whole multiple of the smaller operand's last bit. The product, at most 127.5, is within
    127.5 * 2^-23 < 2^-16 of x / s, fused or not with the addition that follows; so rounding it to
    a multiple of 2^-15 gives exactly k + 1/2 for a tie, and leaves the others on their side.

    No clamp: rounding a scale to bf16 lowers it by at most 2^-8 of itself, so |x / s| is at most
    127 * (1 + 2^-8) < 127.5.
    """
    amax = _largest_magnitude(values)
    finite = amax < _FLOAT_INF_BITS
    amax = tl.where(finite, amax, _FLOAT_INF_BITS - 1).to(tl.float32, bitcast=True)
    bits = by_code_max(amax).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to bf16, half to even
    bits = tl.maximum(bits, SCALE_MIN_BITS)
    inverse = reciprocal((bits << 16).to(tl.float32, bitcast=True))
    # The low byte of 1.5 * 2^23 + n is n.
    rounded = (values * inverse[:, None] + SNAP) + ROUND
    words = rounded.to(tl.int32, bitcast=True)
    mask = tl.where(finite, -1, 0)[:, None]
    # A product's layout has other rows among any four that are neighbours in a thread.
    codes = (words & mask).to(tl.int8) if ROTATE else _low_bytes(words, mask)
    scales = tl.where(finite, bits, BF16_NAN_BITS)
    return codes, scales.to(tl.int16)


@triton.jit
def to_bf16_bits(values):
    """Finite fp32, rounded to bf16 half to even, as its bits in int32."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def by_code_max(values):
    """``values`` / 127, correctly rounded where it is no less than the smallest scale.

    Markstein's theorem: a quotient within one unit in the last place, corrected by its remainder
    (exact, and a fused operation) times the correctly rounded reciprocal, is correctly rounded. So
    a compiler divides too, after it has excluded quotients near the subnormal range.
    """
    if _INTERPRETED:
        return tl.math.div_rn(values, _CODE_MAX)
    return tl.inline_asm_elementwise(
        """{
            .reg .f32 quotient, remainder;
            mul.rn.f32 quotient, $1, 0f3C010204;
            fma.rn.f32 remainder, quotient, 0fC2FE0000, $1;
            fma.rn.f32 $0, remainder, 0f3C010204, quotient;
        }""",
        "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def reciprocal(values):
    """1 / ``values``, correctly rounded."""
    if _INTERPRETED:
        return tl.math.div_rn(1.0, values)
    # A division takes three times as many instructions.
    return tl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_magnitude(values):
    """The bits of each row's largest |value|, fp32 [ROWS, DIM]; a NaN's if it has one."""
    if _INTERPRETED:
        # Of finite values, infinity and NaN, bits are in the order of magnitudes.
        return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    # In this form an instruction takes two magnitudes.
    return tl.reduce(tl.abs(values), 1, _larger).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _low_bytes(words, mask):
    """The low bytes of ``words`` and ``mask``, int32 [ROWS, DIM] and [ROWS, 1], as int8."""
    if _INTERPRETED:
        return (words & mask).to(tl.int8)
    # Four at a time, in a layout where those are of one row.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 low, low, high, 0x5410;
            and.b32 $0, low, $5;
        }""",
        "=r,r,r,r,r,r,r,r,r", [words, mask], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _from_fp8(rows):
    """fp8 to fp32 by its bits: the interpreter's cast knows neither NaN nor subnormals."""
    bits = rows.to(tl.uint8, bitcast=True).to(tl.int32)
    sign, magnitude = bits >> 7, bits & 0x7F
    if rows.dtype == tl.float8e5:
        half = (magnitude << 8).to(tl.int16).to(tl.float16, bitcast=True)
        values = half.to(tl.float32)
    else:
        # As fp16, whose exponents are biased by 8 more.
        half = (magnitude << 7).to(tl.int16).to(tl.float16, bitcast=True)
        values = tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return tl.where(sign == 1, -values, values)


@triton.jit
def _to_fp8(values, dtype: tl.constexpr):
    """fp32 within the range of fp8 to it, half to even, by its bits; as _from_fp8."""
    LEAST: tl.constexpr = -6 if dtype == tl.float8e4nv else -14
    DIGITS: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    bits = values.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    finite = magnitude == magnitude
    magnitude = tl.where(finite, magnitude, 0.0)
    exponent = tl.where(finite, ((bits >> 23) & 0xFF) - 127, LEAST)
    exponent = tl.maximum(exponent, LEAST)
    # Steps of 2^(exponent - DIGITS): 2^DIGITS to 2^(DIGITS + 1) of them, or fewer if subnormal.
    scale = ((DIGITS - exponent + 127) << 23).to(tl.float32, bitcast=True)
    steps = ((magnitude * scale + 12582912.0) - 12582912.0).to(tl.int32)
    codes = ((exponent - LEAST) << DIGITS) + steps
    codes = tl.where(finite, codes, 0x7F) | tl.where(bits < 0, 0x80, 0)
    return codes.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def from_rows(rows):
    """bf16, fp16 or fp8 to fp32."""
    if _INTERPRETED and (rows.dtype == tl.float8e4nv or rows.dtype == tl.float8e5):
        return _from_fp8(rows)
    if _INTERPRETED or rows.dtype != tl.bfloat16:
        return rows.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
        "=&r,=&r,r", [rows], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def to_float(codes):
    """int8 to fp32, four bytes from one register without unpacking them first."""
    if _INTERPRETED:
        return codes.to(tl.float32)
    return tl.inline_asm_elementwise(
        """{
            .reg .s32 code;
            bfe.s32 code, $4, 0, 8;
            cvt.rn.f32.s32 $0, code;
            bfe.s32 code, $4, 8, 8;
            cvt.rn.f32.s32 $1, code;
            bfe.s32 code, $4, 16, 8;
            cvt.rn.f32.s32 $2, code;
            bfe.s32 code, $4, 24, 8;
            cvt.rn.f32.s32 $3, code;
        }""",
        "=&r,=&r,=&r,=&r,r", [codes], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def to_rows(values, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 to ``dtype``, half to even, clamped to its largest finite value; NaN stays NaN."""
    if _INTERPRETED:
        values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if dtype == tl.float8e4nv or dtype == tl.float8e5:
            return _to_fp8(values, dtype)
        if dtype != tl.bfloat16:
            return values.to(dtype)
        # The interpreter's cast truncates.
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        rounded = tl.where(values == values, rounded, BF16_NAN_BITS)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    # Clamps as it rounds, two at a time.
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        return tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    elif dtype == tl.bfloat16:  # noqa: RET505 - after a return, Triton would compile this too
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;",
            "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
            "=r,r,r", [values], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
