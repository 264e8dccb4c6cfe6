/* Casts of arrays at the speed of C: what qtoolkit's are timed against.

   The same arithmetic as qtoolkit's, to nearest and in five directed modes, saturating ("finite"),
   left to the compiler to vectorize. Built for one format and mode with -DFORMAT, -DCODE and
   -DROUNDING; `cast_float32`, `cast_bfloat16` and `cast_float16` use as many threads as OpenMP has.
   The processor's own rounding mode is not touched, since XLA's kernels cannot touch it either.

   Three ways, chosen when compiled: formats with the exponents of float32 (bfloat16) and E8M0 round
   by adding to the pattern; all others by adding a float32 number so large that no fraction of a
   step has room. The last holds where those numbers and the steps are normal in float32, that is
   for every format of at most 8 bits with a mantissa and a zero that qtoolkit ships. */

#include "float_format.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#define BLOCK 1024 /* numbers that are widened at once; they stay in the first cache */

static const struct format F = FORMAT;

INLINE float as_float(uint32_t pattern) {
  float result;
  memcpy(&result, &pattern, sizeof result);
  return result;
}

INLINE uint32_t as_pattern(float x) {
  uint32_t result;
  memcpy(&result, &x, sizeof result);
  return result;
}

INLINE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
INLINE uint32_t greatest(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* What to add before the low `shift` bits are cut off. `is_odd`: the code that remains is. */
INLINE uint32_t increment(uint32_t shift, uint32_t is_odd, uint32_t negative) {
  uint32_t almost_one = (1u << shift) - 1;
  switch (ROUNDING) {
    case NEAREST_EVEN: return almost_one / 2 + is_odd;
    case NEAREST_AWAY: return almost_one / 2 + 1;
    case TOWARD_POSITIVE: return negative ? 0 : almost_one;
    case TOWARD_NEGATIVE: return negative ? almost_one : 0;
    default: return 0;
  }
}

INLINE uint32_t shifted(uint32_t magnitude, uint32_t shift, uint32_t parity, uint32_t negative) {
  uint32_t cut = magnitude >> shift;
  if (ROUNDING == TO_ODD) {
    uint32_t inexact = (magnitude & ((1u << shift) - 1)) != 0;
    return cut + (inexact & ~(cut ^ parity));
  }
  return (magnitude + increment(shift, (cut ^ parity) & 1, negative)) >> shift;
}

/* bfloat16: the codes are the upper part of the patterns. */
INLINE uint32_t upper_part(uint32_t magnitude, uint32_t negative) {
  return least(shifted(magnitude, 23 - F.mantissa_bits, 0, negative), max_code(F));
}

/* E8M0: one binade lower float32 is subnormal, and zero is one code below the lowest. */
INLINE uint32_t without_zero(uint32_t magnitude, uint32_t negative) {
  uint32_t lowered = magnitude < 0x800000 ? magnitude << 1 : magnitude + 0x800000;
  return least(greatest(shifted(lowered, 23, 1, negative), 1) - 1, max_code(F));
}

INLINE uint32_t by_addition(uint32_t magnitude, uint32_t negative) {
  const int32_t lowest_field = 128 - F.bias, shift = 23 - F.mantissa_bits;
  const uint32_t step_bits = (1u << F.mantissa_bits) - 1;
  const uint32_t largest = ((uint32_t)(max_code(F) >> F.mantissa_bits) - F.bias + 127) << 23 |
                           (max_code(F) & step_bits) << shift;
  uint32_t limited = least(magnitude, largest);
  uint32_t binade = greatest(limited, lowest_field << 23) & 0x7F800000;
  float big = as_float(binade + (shift << 23));
  float total = as_float(limited) + big;
  uint32_t nearest = as_pattern(total - big);
  /* The sum's pattern ends in the number of steps. */
  uint32_t code = as_pattern(total) + (binade >> shift) - (lowest_field << F.mantissa_bits);
  uint32_t over = nearest > limited, inexact = nearest != limited;
  if (ROUNDING == NEAREST_AWAY) {
    float half_step = as_float(binade - ((F.mantissa_bits + 1) << 23));
    code += as_float(limited) - as_float(nearest) == half_step;
  } else if (ROUNDING == TO_ODD) {
    code = (code - over) | inexact;
  } else if (ROUNDING != NEAREST_EVEN) {
    uint32_t up = ROUNDING == TOWARD_POSITIVE   ? inexact & (negative ^ 1)
                  : ROUNDING == TOWARD_NEGATIVE ? inexact & negative
                                                : 0;
    code = code - over + up;
  }
  return code & (magnitude_count(F) - 1);
}

INLINE CODE cast(uint32_t pattern) {
  uint32_t magnitude = pattern & 0x7FFFFFFF, negative = pattern >> 31, code;
  if (!F.has_zero) {
    code = without_zero(magnitude, negative);
  } else if (F.exponent_bits == 8) {
    code = upper_part(magnitude, negative);
  } else {
    code = by_addition(magnitude, negative);
  }
  uint32_t is_nan = magnitude > 0x7F800000;
  if (!F.is_signed) code = negative ? 0 : code;
  code = is_nan ? (uint32_t)nan_code(F) : code;
  if (!F.is_signed) return code;
  uint32_t sign = negative * magnitude_count(F);
  if (F.specials == NONE) sign = is_nan ? 0 : sign;
  if (F.specials == FNUZ || F.specials == EXTENDED) sign = code == 0 ? 0 : sign;
  return code | sign;
}

/* The patterns of float32 of at most BLOCK numbers. In a loop of their own, since gcc 12 makes slow
   code of widening to 32 bits and narrowing to 8 in one. */
INLINE void widen_bfloat16(const uint16_t *x, uint32_t *patterns, size_t count) {
  for (size_t i = 0; i < count; i++) patterns[i] = (uint32_t)x[i] << 16;
}

INLINE void widen_float16(const uint16_t *x, uint32_t *patterns, size_t count) {
  size_t i = 0;
#ifdef __F16C__ /* gcc 12 does not vectorize this conversion by itself */
  for (; i + 8 <= count; i += 8) {
    __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i)));
    _mm256_storeu_si256((__m256i *)(patterns + i), _mm256_castps_si256(wide));
  }
#endif
  for (; i < count; i++) {
    _Float16 half;
    memcpy(&half, x + i, sizeof half);
    patterns[i] = as_pattern(half);
  }
}

void cast_float32(const uint32_t *x, CODE *codes, size_t count) {
#pragma omp parallel for
  for (size_t i = 0; i < count; i++) codes[i] = cast(x[i]);
}

#define CAST_FROM(source) \
  void cast_##source(const uint16_t *x, CODE *codes, size_t count) { \
    _Pragma("omp parallel for") \
    for (size_t start = 0; start < count; start += BLOCK) { \
      uint32_t patterns[BLOCK]; \
      size_t length = count - start < BLOCK ? count - start : BLOCK; \
      widen_##source(x + start, patterns, length); \
      for (size_t i = 0; i < length; i++) codes[start + i] = cast(patterns[i]); \
    } \
  }

CAST_FROM(bfloat16)
CAST_FROM(float16)
