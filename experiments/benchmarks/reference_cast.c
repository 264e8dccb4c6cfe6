/* float32 to small floating-point formats, as the standards define it: an oracle.

   IEEE P3109 (Interim Report v4.0) defines a conversion as RoundToPrecision, Saturate and Encode,
   and so does this file. It shares no code with qtoolkit. All arithmetic is that of integers, and
   exact.

   Built with -DFORMAT, the fields of a format, -DCODE, the type of its codes, and -DROUNDING it also
   has `count_differences`, which knows all that when compiled and works on many numbers at once. */

#include "float_format.h"

#include <math.h>

INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t greatest(int32_t a, int32_t b) { return a > b ? a : b; }

/* A float32 number: (-1)**negative * significand * 2**(exponent - 23), and unless it is zero the
   significand has 24 bits, in subnormal numbers, too. */
struct parts {
  int32_t negative, is_inf, is_nan, significand, exponent;
};

INLINE struct parts shifted_if_short(struct parts x, int32_t places) {
  int32_t missing = x.significand < 1 << (24 - places) ? places : 0;
  x.significand <<= missing;
  x.exponent -= missing;
  return x;
}

INLINE struct parts parts_of(uint32_t pattern) {
  int32_t field = pattern >> 23 & 0xFF, mantissa = pattern & 0x7FFFFF;
  struct parts x;
  x.negative = pattern >> 31;
  x.is_inf = (field == 0xFF) & (mantissa == 0);
  x.is_nan = (field == 0xFF) & (mantissa > 0);
  x.significand = mantissa + (field > 0) * 0x800000;
  x.exponent = greatest(field, 1) - 127;
  x = shifted_if_short(x, 16);
  x = shifted_if_short(x, 8);
  x = shifted_if_short(x, 4);
  x = shifted_if_short(x, 2);
  return shifted_if_short(x, 1);
}

/* RoundToPrecision. Returns the code of the rounded magnitude in the format continued without end:
   beyond max_code there are more numbers; below a format's lowest one, -1 stands for zero. */
INLINE int32_t round_to_precision(struct parts x, struct format f, int rounding) {
  int32_t lowest = (f.has_zero ? 1 : 0) - f.bias;
  int32_t exponent = x.significand == 0 ? lowest : x.exponent;
  int32_t binade = greatest(exponent, lowest);
  /* One step of this binade is 2**shift units of the significand. From 26 on every number is less
     than half a step, and 26 gives the same answer. */
  int32_t shift = least(23 - f.mantissa_bits + binade - exponent, 26);
  int32_t lower = x.significand >> shift;
  int32_t rest = x.significand - (lower << shift), half = 1 << (shift - 1);
  /* One binade beyond the format is as good as any. */
  int32_t field = least(binade - lowest, 1 << f.exponent_bits);
  int32_t code = (field << f.mantissa_bits) + lower - (f.has_zero ? 0 : 1 << f.mantissa_bits);
  /* 0: x is a number of the format; 1, 2, 3: below, at and above the middle between two. */
  int32_t place = (rest > 0) + (rest >= half) + (rest > half);
  int32_t is_odd = code & 1, inexact = place > 0, up = 0;
  switch (rounding) {
    case NEAREST_EVEN: up = place + is_odd > 2; break;
    case NEAREST_AWAY: up = place >= 2; break;
    case TOWARD_ZERO: up = 0; break;
    case TOWARD_POSITIVE: up = inexact & !x.negative; break;
    case TOWARD_NEGATIVE: up = inexact & x.negative; break;
    case TO_ODD: up = inexact & !is_odd; break;
  }
  return code + up;
}

/* Whether SatNone leaves a number beyond the largest one at that, because of its direction. */
INLINE int32_t stays_finite(struct parts x, struct format f, int rounding) {
  switch (rounding) {
    case TOWARD_ZERO: return 1;
    case TOWARD_POSITIVE: return x.negative;
    case TOWARD_NEGATIVE: return !x.negative;
    case TO_ODD: return max_code(f) & 1;
    default: return 0;
  }
}

/* Saturate: SatFinite, SatPropagate and SatNone. */
INLINE int32_t saturate(int32_t code, struct parts x, struct format f, int rounding, int saturation) {
  int32_t finite_limit = max_code(f), infinite_limit = max_code(f);
  if (saturation != SAT_FINITE) infinite_limit = overflow_code(f);
  if (saturation == SAT_NONE && !stays_finite(x, f, rounding)) finite_limit = overflow_code(f);
  int32_t limit = x.is_inf ? infinite_limit : finite_limit;
  int32_t saturated = x.is_inf | (code > max_code(f)) ? limit : code;
  if (f.is_signed) return saturated;
  /* Below the lowest value of an unsigned format: that value, or NaN where nothing saturates. */
  int32_t is_zero = (code == 0) & f.has_zero & !x.is_inf;
  int32_t is_below = (x.negative & !is_zero) | ((code < 0) & !x.is_inf);
  int32_t below = saturation == SAT_NONE && f.specials != NONE ? nan_code(f) : 0;
  return is_below ? below : saturated;
}

/* Encode: NaN and the sign. */
INLINE uint32_t encode(uint32_t pattern, struct format f, int rounding, int saturation) {
  struct parts x = parts_of(pattern);
  int32_t code = saturate(round_to_precision(x, f, rounding), x, f, rounding, saturation);
  code = x.is_nan ? nan_code(f) : code;
  int32_t is_signed = x.negative & f.is_signed;
  if (f.specials == NONE) is_signed &= !x.is_nan;
  if (f.specials == FNUZ || f.specials == EXTENDED) is_signed &= (code != 0) & (code != nan_code(f));
  return code + is_signed * magnitude_count(f);
}

static double decode(uint32_t code, struct format f) {
  int32_t count = magnitude_count(f);
  int negative = f.is_signed && (int32_t)code >= count;
  int32_t magnitude = negative ? (int32_t)code - count : (int32_t)code;
  double value = NAN;
  if (magnitude <= max_code(f)) {
    int32_t field = magnitude >> f.mantissa_bits, significand = magnitude & ((1 << f.mantissa_bits) - 1);
    if (field > 0 || !f.has_zero) significand += 1 << f.mantissa_bits;
    if (field == 0 && f.has_zero) field = 1;
    value = ldexp(significand, field - f.bias - f.mantissa_bits);
  }
  if ((f.specials == IEEE || f.specials == EXTENDED) && magnitude == max_code(f) + 1) value = INFINITY;
  if (has_one_nan_at_minus_zero(f) && (int32_t)code == nan_code(f)) return NAN;
  return negative ? copysign(value, -1) : value;
}

static __attribute__((noinline)) uint32_t encode_one(
    uint32_t pattern, const struct format *f, int rounding, int saturation) {
  return encode(pattern, *f, rounding, saturation);
}

void encode_all(
    const uint32_t *patterns, uint32_t *codes, size_t count, const struct format *f, int rounding,
    int saturation) {
  for (size_t i = 0; i < count; i++) codes[i] = encode_one(patterns[i], f, rounding, saturation);
}

void decode_all(const uint32_t *codes, double *values, size_t count, const struct format *f) {
  for (size_t i = 0; i < count; i++) values[i] = decode(codes[i], *f);
}

#ifdef FORMAT

static const struct format FIXED = FORMAT;

#define SATURATION_COUNT 3

/* How many codes are not those of the patterns first, first + 1 and so on, for each saturation, whose
   codes lie one behind the other, `count` each. One loop, so that what saturations share is computed
   once. Writes the first `most` such patterns of each to `examples`. */
void count_differences(
    uint32_t first, const CODE *codes, uint32_t count, uint32_t *different, uint32_t *examples,
    uint32_t most) {
  const CODE *finite = codes, *propagate = codes + count, *none = codes + 2 * (size_t)count;
  uint32_t in_finite = 0, in_propagate = 0, in_none = 0;
  for (uint32_t i = 0; i < count; i++) {
    in_finite += (CODE)encode(first + i, FIXED, ROUNDING, SAT_FINITE) != finite[i];
    in_propagate += (CODE)encode(first + i, FIXED, ROUNDING, SAT_PROPAGATE) != propagate[i];
    in_none += (CODE)encode(first + i, FIXED, ROUNDING, SAT_NONE) != none[i];
  }
  different[SAT_FINITE] = in_finite;
  different[SAT_PROPAGATE] = in_propagate;
  different[SAT_NONE] = in_none;
  for (int s = 0; s < SATURATION_COUNT; s++)
    for (uint32_t i = 0, found = 0; i < count && found < most && found < different[s]; i++)
      if ((CODE)encode_one(first + i, &FIXED, ROUNDING, s) != codes[s * (size_t)count + i])
        examples[s * most + found++] = first + i;
}

#endif
