/* A floating-point format of at most 16 bits, and its codes that are not plain numbers.

   After OCP OFP8 1.0, OCP MX 1.0, IEEE P3109 (Interim Report v4.0), IEEE 754-2019 and, for FNUZ,
   arXiv:2206.02915. Nothing here is taken from qtoolkit: its casts are tested by what includes this. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum specials {
  IEEE,     /* the top exponent field holds the infinities and the NaNs */
  FN,       /* no infinity; NaN where every bit but the sign is one */
  FNUZ,     /* no infinity; the only NaN stands at "-0" */
  EXTENDED, /* P3109: an infinity above the largest number, one zero, one NaN */
  NONE,     /* every code is a number */
};
enum overflow { TO_INF, TO_NAN, TO_MAX };
enum rounding { NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, TOWARD_POSITIVE, TOWARD_NEGATIVE, TO_ODD };
enum saturation { SAT_FINITE, SAT_PROPAGATE, SAT_NONE };

/* Without a zero, exponent field 0 is a normal binade, as in E8M0. */
struct format {
  int32_t exponent_bits, mantissa_bits, bias, specials, overflow, is_signed, has_zero;
};

#define INLINE static inline __attribute__((always_inline))

/* Codes of magnitudes, that is, without the sign bit: they are in the order of the values. */

INLINE int32_t magnitude_count(struct format f) { return 1 << (f.exponent_bits + f.mantissa_bits); }

INLINE int32_t max_code(struct format f) {
  int32_t count = magnitude_count(f);
  if (f.specials == IEEE) return count - (1 << f.mantissa_bits) - 1;
  if (f.specials == FN) return count - 2;
  if (f.specials == EXTENDED) return f.is_signed ? count - 2 : count - 3;
  return count - 1;
}

INLINE int has_one_nan_at_minus_zero(struct format f) {
  return f.specials == FNUZ || (f.specials == EXTENDED && f.is_signed);
}

/* Positive and quiet; formats without NaN write NaN as their largest number. */
INLINE int32_t nan_code(struct format f) {
  if (f.specials == NONE) return max_code(f);
  if (has_one_nan_at_minus_zero(f)) return magnitude_count(f);
  if (f.specials == IEEE) return max_code(f) + 1 + (1 << f.mantissa_bits) / 2;
  return magnitude_count(f) - 1;
}

INLINE int32_t overflow_code(struct format f) {
  if (f.overflow == TO_INF) return max_code(f) + 1;
  return f.overflow == TO_NAN ? nan_code(f) : max_code(f);
}
