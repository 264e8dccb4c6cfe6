// The arithmetic of the format explorer: values, codes and roundings, in exact doubles.
// Formats of at most 16 bits have values and midpoints that doubles hold.
"use strict";

const ROUNDINGS = ["nearest_even", "nearest_away", "toward_zero", "toward_positive",
  "toward_negative", "to_odd"];
const SATURATIONS = ["finite", "propagate", "none"];
const RANDOM_BITS = 16; // of the library's "stochastic", Stochastic("B", bits=16)

/** 2**n by its bits: no library's power function is trusted to be exact. */
function powerOfTwo(n) {
  if (n < -1022) return powerOfTwo(n + 52) * 2 ** -52;
  const view = new DataView(new ArrayBuffer(8));
  view.setUint32(0, (n + 1023) << 20);
  return view.getFloat64(0);
}

function isNegative(x) { return x < 0 || Object.is(x, -0); }

class FloatFormat {
  constructor(fields) {
    Object.assign(this, fields);
    this.signCode = this.signed ? 1 << (this.bits - 1) : 0;
  }

  /** What the exponent and mantissa fields of a code without sign stand for; zero below code 0. */
  magnitude(code) {
    if (code < 0) return 0;
    const mantissa = code & ((1 << this.mantissaBits) - 1);
    let field = code >> this.mantissaBits, hidden = 1;
    if (this.hasZero) {
      hidden = field > 0 ? 1 : 0;
      field = Math.max(field, 1);
    }
    return ((hidden << this.mantissaBits) + mantissa) *
      powerOfTwo(field - this.bias - this.mantissaBits);
  }

  value(code) {
    if (this.nanRanges.some(([start, stop]) => code >= start && code < stop)) return NaN;
    const negative = this.signed && code >= this.signCode;
    const magnitude = negative ? code - this.signCode : code;
    const value = magnitude === this.infCode ? Infinity : this.magnitude(magnitude);
    return negative ? -value : value;
  }

  /** The neighbours of a finite magnitude as codes of an unlimited format: [lower, upper]. */
  neighbours(magnitude) {
    if (magnitude >= this.magnitude(this.maxCode + 1)) return [this.maxCode + 1, this.maxCode + 1];
    let low = this.hasZero ? 0 : -1, high = this.maxCode + 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.magnitude(middle) <= magnitude) low = middle; else high = middle;
    }
    return this.magnitude(low) === magnitude ? [low, low] : [low, high];
  }

  round(x, rounding, saturation) {
    const negative = isNegative(x);
    if (Number.isNaN(x)) return this.finished(0, false, x, rounding, saturation);
    if (!Number.isFinite(x)) return this.finished(this.maxCode, negative, x, rounding, saturation);
    const magnitude = Math.abs(x);
    const [lower, upper] = this.neighbours(magnitude);
    let code = lower;
    if (upper > lower) {
      const middle = (this.magnitude(lower) + this.magnitude(upper)) / 2;
      if (roundsUp(rounding, Math.sign(magnitude - middle), negative, lower)) code = upper;
    }
    return this.finished(code, negative, x, rounding, saturation);
  }

  finished(code, negative, x, rounding, saturation) {
    if (Number.isNaN(x)) return this.nanCode === null ? this.maxCode : this.nanCode;
    const isInfinite = !Number.isFinite(x), isBelow = code < 0;
    if (code > this.maxCode || isInfinite) {
      const stays = saturation === "propagate" || staysFinite(rounding, negative, this.maxCode);
      const overflows = saturation !== "finite" && (isInfinite || !stays);
      code = overflows ? this.overflowCode : this.maxCode;
    }
    if (!this.signed) {
      const outside = saturation === "none" && this.nanCode !== null ? this.nanCode : 0;
      const isOutside = this.hasZero ? negative && code !== 0 : negative || isBelow;
      return isOutside ? outside : code;
    }
    const unsigned = !this.hasNegativeZero && (code === 0 || code === this.nanCode);
    return negative && !unsigned ? code + this.signCode : code;
  }

  /** Of stochastic rounding: the two results, and how often it is the one further from zero. */
  stochastic(x) {
    const negative = isNegative(x), magnitude = Math.abs(x);
    const [lower, upper] = this.neighbours(magnitude);
    const [low, high] = [lower, upper].map(
      (code) => this.finished(code, negative, x, "stochastic", "finite"));
    const step = this.magnitude(upper) - this.magnitude(lower);
    const fraction = step > 0 ? (magnitude - this.magnitude(lower)) / step : 0;
    return { low, high, probability: probabilityUp(fraction) };
  }

  fields() {
    const sign = this.signed ? 1 : 0;
    return [["sign", sign], ["exponent", this.exponentBits], ["mantissa", this.mantissaBits]];
  }
}

class IntegerFormat {
  constructor(fields) {
    Object.assign(this, fields);
    this.lowest = this.signed ? -(2 ** (this.bits - 1)) : 0;
  }

  value(code) { return code > this.maxCode ? code - 2 ** this.bits : code; }

  code(integer) {
    const limit = 2n ** BigInt(this.bits);
    return Number(((BigInt(integer) % limit) + limit) % limit);
  }

  round(x, rounding, saturation) {
    if (this.isBool) return x === 0 ? 0 : 1;
    if (Number.isNaN(x)) return 0;
    const negative = isNegative(x), limit = negative ? this.lowest : this.maxCode;
    if (!Number.isFinite(x)) return this.code(limit);
    const magnitude = Math.abs(x), lower = Math.floor(magnitude);
    let integer = lower;
    if (magnitude > lower) {
      // Below 2**52 the middle is exact, and above there are no fractions.
      const side = Math.sign(magnitude - (lower + 0.5));
      if (roundsUp(rounding, side, negative, lower % 2)) integer = lower + 1;
    }
    if (negative) integer = -integer;
    if (saturation !== "none") integer = Math.min(Math.max(integer, this.lowest), this.maxCode);
    return this.code(integer);
  }

  stochastic(x) {
    const magnitude = Math.abs(x), lower = Math.floor(magnitude), sign = x < 0 ? -1 : 1;
    const [low, high] = [lower, Math.ceil(magnitude)].map(
      (integer) => this.round(sign * integer, "nearest_even", "finite"));
    return { low, high, probability: probabilityUp(magnitude - lower) };
  }

  fields() {
    return this.signed ? [["sign", 1], ["value", this.bits - 1]] : [["value", this.bits]];
  }
}

class TableFormat {
  constructor(fields) {
    Object.assign(this, fields);
    this.values = this.values.map((v) => ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[v] ?? v);
    this.rising = this.values.map((value, code) => ({ value, code }))
      .filter(({ value }) => Number.isFinite(value)).sort((a, b) => a.value - b.value);
  }

  value(code) { return this.values[code]; }

  overflowCode(end) {
    const code = this.values.indexOf(end);
    if (this.overflow === "INF" && code >= 0) return code;
    if (this.overflow === "NAN" && this.nanCode !== null) return this.nanCode;
    return this.rising.at(end > 0 ? -1 : 0).code;
  }

  /** The values, with one more on either side where numbers beyond them overflow. */
  ladder(rounding, saturation) {
    const steps = this.rising.map(({ value, code }) => ({ value, code, parity: code }));
    const ties = this.ties ? [...this.ties] :
      steps.slice(1).map(({ value }, i) => (value + steps[i].value) / 2);
    if (this.beyond !== null && saturation === "none" && this.overflow !== "MAX") {
      const [first, last] = [steps[0], steps.at(-1)];
      if (!staysFinite(rounding, false, last.code)) {
        ties.push((last.value + this.beyond) / 2);
        steps.push({ value: this.beyond, code: this.overflowCode(Infinity), parity: last.code + 1 });
      }
      if (first.value < 0 && !staysFinite(rounding, true, first.code)) {
        ties.unshift((first.value - this.beyond) / 2);
        steps.unshift(
          { value: -this.beyond, code: this.overflowCode(-Infinity), parity: first.code + 1 });
      }
    }
    return { steps, ties };
  }

  round(x, rounding, saturation) {
    if (Number.isNaN(x)) return this.nanCode === null ? this.maxCode : this.nanCode;
    if (!Number.isFinite(x) && saturation !== "finite" && this.overflow !== "MAX") {
      return this.overflowCode(x);
    }
    const { steps, ties } = this.ladder(rounding, saturation);
    const above = steps.findIndex(({ value }) => value > x);
    if (above === 0) return steps[0].code;
    if (above < 0) return steps.at(-1).code;
    const [lower, upper] = [steps[above - 1], steps[above]];
    if (lower.value === x) return lower.code;
    return this.goesUp(x, lower, upper, ties[above - 1], rounding) ? upper.code : lower.code;
  }

  goesUp(x, lower, upper, tie, rounding) {
    const positive = lower.value >= 0;
    const differ = (lower.parity + upper.parity) % 2 !== 0;
    switch (rounding) {
      case "nearest_even": case "nearest_away":
        if (x !== tie) return x > tie;
        return rounding === "nearest_even" ? differ && upper.parity % 2 === 0 : positive;
      case "to_odd": return differ && upper.parity % 2 === 1;
      case "toward_zero": return !positive;
      default: return rounding === "toward_positive";
    }
  }

  fields() { return [["code", this.bits]]; }
}

/** Whether the upper of two magnitudes is chosen; `side`: sign of the distance from the middle. */
function roundsUp(rounding, side, negative, lowerCode) {
  const isOdd = lowerCode % 2 !== 0;
  switch (rounding) {
    case "nearest_even": return side > 0 || (side === 0 && isOdd);
    case "nearest_away": return side >= 0;
    case "toward_positive": return !negative;
    case "toward_negative": return negative;
    case "to_odd": return !isOdd;
    default: return false;
  }
}

/** Whether finite overflow is rounded down to the largest magnitude where nothing clamps. */
function staysFinite(rounding, negative, largestCode) {
  if (rounding === "to_odd") return largestCode % 2 === 1;
  return rounding === "toward_zero" ||
    rounding === (negative ? "toward_positive" : "toward_negative");
}

/** Of variant B with N bits: the share of R in 0..2**N-1 with floor(v 2**(N+1)) + 2R + 1 >= 2**(N+1). */
function probabilityUp(fraction) {
  const all = 2 ** RANDOM_BITS;
  const least = Math.ceil((2 * all - 1 - Math.floor(fraction * 2 * all)) / 2);
  return (all - Math.min(all, Math.max(0, least))) / all;
}

function makeFormat(fields) {
  const kinds = { float: FloatFormat, integer: IntegerFormat, table: TableFormat };
  return new kinds[fields.kind](fields);
}

/** A block format with the numbers of one block: its scale, and an element divided by it. */
class BlockFormat {
  constructor(fields) {
    Object.assign(this, fields);
    this.element = makeFormat(fields.element);
    this.scale = fields.scale === null ? null : makeFormat(fields.scale);
  }

  stored(scale) {
    return this.scale === null ? scale :
      this.scale.value(this.scale.round(scale, "nearest_even", "finite"));
  }

  quotientScale(amax, largest, least) {
    return amax === 0 ? 1 : Math.max(Math.fround(amax / Math.fround(largest)), least);
  }

  tensorScale(tensorAmax) {
    const least = powerOfTwo(-126) / this.leastScale;
    return this.quotientScale(tensorAmax, this.largest * this.scaleMax, least);
  }

  /** The scale as it is stored, and what elements are divided by, for float32 amaxes. */
  scales(amax, tensorAmax) {
    amax = Math.max(amax, Math.fround(this.amaxEpsilon));
    if (this.rule !== "amax") {
      const scale = powerOfTwo(this.power(amax));
      return { scale, effective: scale * powerOfTwo(this.elementExponent) };
    }
    if (!this.hasTensorScale) {
      const scale = this.stored(this.quotientScale(amax, this.largest, this.leastScale));
      return { scale, effective: scale };
    }
    const second = this.tensorScale(tensorAmax);
    const wanted = Math.fround(Math.fround(amax / Math.fround(this.largest)) / second);
    const scale = this.stored(Math.max(wanted, this.leastScale));
    return { scale, second, effective: Math.fround(scale * second) };
  }

  /** The exponent of a scale that is a power of two, by the rule, from exponent bits. */
  power(amax) {
    const [lowest, highest] = this.powers;
    if (amax === 0) return Math.max(lowest, -127);
    let exponent = -149; // float32's, subnormals included
    while (exponent < 127 && powerOfTwo(exponent + 1) <= amax) exponent += 1;
    const fraction = (amax / powerOfTwo(exponent) - 1) * 2 ** 23;
    let e = exponent - this.largestExponent;
    if (this.rule === "ceil" && fraction !== 0) e += 1;
    if (this.rule === "rceil" && fraction > this.largestFraction) e += 1;
    if (this.rule === "even") {
      const mantissaBits = this.element.mantissaBits ?? 0;
      if (fraction >= 2 ** 23 - 2 ** (22 - mantissaBits)) e += 1;
    }
    return Math.min(Math.max(e, lowest), highest);
  }

  quantized(x, amax, tensorAmax) {
    const { scale, second, effective } = this.scales(amax, tensorAmax);
    const exact = x / effective; // by a power of two exact, else one IEEE division
    const quotient = this.rule === "amax" ? Math.fround(exact) : exact;
    let code = this.element.round(quotient, "nearest_even", "finite");
    let value = this.element.value(code);
    if (this.narrowRange && value === this.element.lowest) {
      value += 1;
      code = this.element.code(value);
    }
    return { scale, second, code, value, result: Math.fround(value * effective) };
  }
}

/** Root of the mean square of |x - q| / |x| over [2**exponent, 2**(exponent + 1)), times `scale`. */
function relativeError(format, exponent, scale = 1, samples = 64) {
  let sum = 0;
  for (let i = 0; i < samples; i += 1) {
    const x = (1 + (i + 0.5) / samples) * powerOfTwo(exponent);
    const q = format.value(format.round(x / scale, "nearest_even", "finite")) * scale;
    sum += ((x - q) / x) ** 2;
  }
  return Math.sqrt(sum / samples);
}

if (typeof module !== "undefined") {
  module.exports = { ROUNDINGS, SATURATIONS, BlockFormat, makeFormat, relativeError };
}
