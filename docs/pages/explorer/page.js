// The format explorer's page: what is shown, and what keys and clicks do. Numbers: numbers.js.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const formats = new Map();
  const blocks = new Map();
  const CODES_SHOWN = 256;

  /** An element: make("td", { class: "overflow" }, "text", child, ...). */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function drawing(width, height, label) {
    return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  }

  /** As wide as its place on the page, so that its text has the size of the page's. */
  function widthOf(id) { return Math.max(320, Math.min(900, $(id).clientWidth || 800)); }

  function shown(value) {
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Object.is(value, -0)) return "−0";
    return String(value).replace("-", "−").replace("e−", "e-");
  }

  /** A float32 number without the digits of its double. */
  const short = (value) => shown(Number(value.toPrecision(9)));

  const hex = (code, bits) => `0x${code.toString(16).toUpperCase().padStart(Math.ceil(bits / 4), "0")}`;

  /** The number in a text field; null, and the field marked, where there is none. */
  function numberIn(field) {
    const text = field.value.trim().toLowerCase().replace("−", "-").replace("∞", "inf");
    const special = { inf: Infinity, "+inf": Infinity, "-inf": -Infinity, nan: NaN };
    const value = text in special ? special[text] : text === "" ? NaN : Number(text);
    const isNumber = text in special || !Number.isNaN(value);
    field.setAttribute("aria-invalid", String(!isNumber));
    return isNumber ? value : null;
  }

  // One number in one format.

  function showNumber() {
    const format = formats.get($("format").value), x = numberIn($("number"));
    $("code").max = 2 ** format.bits - 1;
    showFacts(format);
    if (x === null) {
      $("summary").textContent = `“${$("number").value}” is not a number; write for example 0.3, 1e-4 or -inf.`;
      return;
    }
    const code = format.round(x, "nearest_even", "finite"), value = format.value(code);
    if (document.activeElement !== $("code")) $("code").value = code;
    $("summary").textContent = `${shown(x)} in ${format.name}: code ${hex(code, format.bits)}, ` +
      `which stands for ${shown(value)}` + errorText(x, value) + ".";
    showBits(format, code);
    showLine(format, x, code);
    showRoundings(format, x);
    showStochastic(format, x);
    showCodes(format, code);
  }

  function errorText(x, value) {
    if (!Number.isFinite(x) || !Number.isFinite(value) || x === value) return "";
    return x === 0 ? "" : `, ${(100 * Math.abs((x - value) / x)).toPrecision(3)} % off`;
  }

  function showFacts(format) {
    const all = finiteValues(format), positive = all.find((value) => value > 0);
    const [lowest, largest] = [all[0], all.at(-1)];
    $("facts").textContent = `${format.bits} bits, ${all.length.toLocaleString("en")} finite values ` +
      `from ${shown(lowest)} to ${shown(largest)}, the smallest positive one ${shown(positive)}; ` +
      `${format.infCode === null ? "no infinity" : "has infinities"}; ` +
      `${format.nanCode === null ? "no NaN" : "has NaN"}.`;
  }

  const finiteCache = new Map();
  function finiteValues(format) {
    if (!finiteCache.has(format.name)) {
      const values = new Set();
      for (let code = 0; code < 2 ** format.bits; code += 1) {
        const value = format.value(code);
        if (Number.isFinite(value)) values.add(value === 0 ? 0 : value);
      }
      finiteCache.set(format.name, [...values].sort((a, b) => a - b));
    }
    return finiteCache.get(format.name);
  }

  function showBits(format, code) {
    const bits = code.toString(2).padStart(format.bits, "0");
    let start = 0;
    $("bits").replaceChildren(...format.fields().filter(([, width]) => width > 0).map(([name, width]) => {
      const digits = bits.slice(start, start + width);
      start += width;
      return make("div", {}, make("code", {}, digits), name);
    }));
  }

  function showLine(format, x, code) {
    const all = finiteValues(format), value = format.value(code);
    const width = widthOf("line"), left = 20, right = width - 20;
    const svg = drawing(width, 160, `Number line of ${format.name}`);
    // Above, every value on a logarithmic line that is linear around zero; below, the neighbourhood.
    const least = all.find((v) => v > 0), most = Math.max(all.at(-1), -all[0]);
    const span = Math.log2(most / least) + 1;
    const folded = (v) => v === 0 ? 0 : Math.sign(v) *
      (Math.abs(v) < least ? Math.abs(v) / least : 1 + Math.log2(Math.abs(v) / least));
    const from = all[0] < 0 ? -span : 0;
    const place = (v) => left + (right - left) * (folded(clamp(v, -most, most)) - from) / (span - from);
    const step = Math.max(1, Math.ceil(all.length / 2000));
    all.filter((_, i) => i % step === 0).forEach((v) => svg.append(tick(place(v), 10, 34, colour(format, v))));
    svg.append(...[...new Set([all[0], 0, all.at(-1)])].map((v) => label(place(v), 48, shown(v), width)));
    mark(svg, place(x), 4, 40, x);
    const count = width < 500 ? 5 : 9;
    const near = neighbourhood(all, Number.isFinite(value) ? value : all.at(-1), count);
    const [first, last] = [near[0], near.at(-1)];
    const at = (v) => left + 20 + (right - left - 40) * (clamp(v, first, last) - first) / (last - first || 1);
    near.forEach((v, i) => { // labels in two rows: where values are close they would overlap
      svg.append(tick(at(v), 80, 110, colour(format, v)), label(at(v), 126 + 16 * (i % 2), shorter(v), width));
    });
    mark(svg, at(x), 74, 114, x);
    if (Number.isFinite(value)) {
      svg.append(draw("circle", { cx: at(value), cy: 95, r: 6, fill: "none", stroke: "var(--mark)", "stroke-width": 2 }));
    }
    $("line").replaceChildren(svg);
    $("line-text").textContent = `Above: all values of ${format.name} on a logarithmic line. Below: the ` +
      `values around ${shown(value)}: ${near.map(shown).join(", ")}. Red values are subnormal. The orange line is the ` +
      "number, the circle is the nearest value.";
  }

  const clamp = (v, low, high) => Number.isNaN(v) ? low : Math.min(Math.max(v, low), high);
  const shorter = (v) => shown(Number(v.toPrecision(5)));

  function neighbourhood(all, value, count) {
    const index = Math.max(0, all.findIndex((v) => v >= value));
    const start = clamp(index - (count - 1) / 2, 0, Math.max(0, all.length - count));
    return all.slice(start, start + count);
  }

  function colour(format, v) {
    const normal = format.kind !== "float" || !format.hasZero ||
      Math.abs(v) >= format.magnitude(1 << format.mantissaBits);
    return v === 0 ? "currentColor" : normal ? "var(--normal)" : "var(--subnormal)";
  }

  const tick = (x, y1, y2, stroke) => draw("line", { x1: x, x2: x, y1, y2, stroke, "stroke-width": 1 });

  function label(x, y, text, width) {
    const anchor = x < 60 ? "start" : x > width - 60 ? "end" : "middle";
    return draw("text", { x, y, "text-anchor": anchor, "font-size": 12, fill: "currentColor" }, text);
  }

  function mark(svg, x, y1, y2, value) {
    if (Number.isNaN(value)) return;
    svg.append(draw("line", { x1: x, x2: x, y1, y2, stroke: "var(--mark)", "stroke-width": 3 }));
  }

  function showRoundings(format, x) {
    const head = make("tr", {}, make("th", { scope: "col" }, "rounding"),
      ...SATURATIONS.map((name) => make("th", { scope: "col" }, `saturation ${name}`)));
    const rows = ROUNDINGS.map((rounding) => make("tr", {}, make("th", { scope: "row" }, rounding),
      ...SATURATIONS.map((saturation) => {
        const code = format.round(x, rounding, saturation), value = format.value(code);
        const special = !Number.isFinite(value) || (Number.isFinite(x) && Math.abs(x) > Math.abs(value) && code === format.maxCode);
        return make("td", { "data-code": code, class: special ? "overflow" : "" },
          `${shown(value)} `, make("code", {}, hex(code, format.bits)));
      })));
    $("roundings").replaceChildren(make("caption", {}, `What ${shown(x)} becomes`),
      make("thead", {}, head), make("tbody", {}, ...rows));
  }

  function showStochastic(format, x) {
    if (!format.stochastic || !Number.isFinite(x)) {
      $("stochastic").textContent = format.stochastic ? "" : "Stochastic rounding is not defined for tables.";
      return;
    }
    const { low, high, probability } = format.stochastic(x);
    const chance = (p) => `${Number((100 * p).toPrecision(6))} %`;
    $("stochastic").textContent = "Rounded stochastically, with 16 random bits: " + (probability === 0 ?
      `always ${shown(format.value(low))}.` : `${shown(format.value(high))} in ${chance(probability)} of ` +
      `the draws, else ${shown(format.value(low))}.`);
    $("stochastic").dataset.probability = probability;
  }

  function showCodes(format, current) {
    const count = Math.min(2 ** format.bits, CODES_SHOWN), columns = Math.min(16, count);
    const first = current - (current % count);
    const head = make("tr", {}, make("td", {}),
      ...Array.from({ length: columns }, (_, i) => make("th", { scope: "col" }, `…${i.toString(16).toUpperCase()}`)));
    const rows = [];
    for (let row = first; row < first + count; row += columns) {
      const cells = Array.from({ length: columns }, (_, i) => {
        const code = row + i, isCurrent = code === current;
        return make("td", {}, make("button", {
          type: "button", "data-code": code, tabindex: isCurrent ? 0 : -1, "aria-current": isCurrent,
          "aria-label": `${hex(code, format.bits)}: ${shown(format.value(code))}`,
        }, shorter(format.value(code))));
      });
      rows.push(make("tr", {}, make("th", { scope: "row" }, hex(row, format.bits)), ...cells));
    }
    const part = 2 ** format.bits > count ? `, codes ${hex(first, format.bits)} to ${hex(first + count - 1, format.bits)}` : "";
    $("codes").replaceChildren(make("caption", {}, `The values of ${format.name}${part}. Arrow keys move, Enter chooses.`),
      make("thead", {}, head), make("tbody", {}, ...rows));
  }

  function choose(code) {
    const format = formats.get($("format").value), value = format.value(code);
    $("code").value = code;
    $("number").value = Number.isNaN(value) ? "nan" : Object.is(value, -0) ? "-0" :
      String(value).replace("Infinity", "inf");
    showNumber();
    $("code").value = code; // a NaN, or a zero, may have another code of its own
  }

  function moveInCodes(event) {
    const code = Number(event.target.dataset?.code);
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -16, ArrowDown: 16 }[event.key];
    if (step === undefined || Number.isNaN(code)) return;
    const next = $("codes").querySelector(`button[data-code="${code + step}"]`);
    if (next === null) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // Two formats, by their error.

  function showErrors() {
    const chosen = ["first", "second"].map((id) => formats.get($(id).value));
    const scaled = $("scaling").value === "amax";
    const top = scaled ? 0 : Math.min(40, Math.ceil(Math.log2(Math.max(...chosen.map(largestOf)))) + 1);
    const bottom = Math.max(top - 48, scaled ? -24 : Math.floor(Math.log2(Math.min(...chosen.map(leastOf)))) - 2);
    const octaves = Array.from({ length: Math.max(1, top - bottom) }, (_, i) => bottom + i);
    const scales = chosen.map((format) => scaled ? 1 / largestOf(format) : 1);
    const errors = chosen.map((format, i) => octaves.map((e) => relativeError(format, e, scales[i])));
    drawErrors(chosen, octaves, errors);
    const head = make("tr", {}, make("th", { scope: "col" }, "magnitudes from"),
      ...chosen.map((format) => make("th", { scope: "col" }, format.name)));
    $("error-table").replaceChildren(make("caption", {}, "Relative error by octave"), make("thead", {}, head),
      make("tbody", {}, ...octaves.map((e, row) => make("tr", {}, make("th", { scope: "row" }, `2^${e}`),
        ...errors.map((column) => make("td", {}, `${(100 * column[row]).toPrecision(3)} %`))))));
  }

  const largestOf = (format) => finiteValues(format).at(-1);
  const leastOf = (format) => finiteValues(format).find((v) => v > 0);

  function drawErrors(chosen, octaves, errors) {
    const width = widthOf("errors"), height = 336, left = 60, right = width - 20, top = 20, bottom = 280;
    const svg = drawing(width, height, `Relative error of ${chosen.map((f) => f.name).join(" and ")} over the magnitude`);
    const least = Math.min(0.5, ...errors.flat().filter((e) => e > 0));
    const floor = Math.floor(Math.log10(least));
    const x = (i) => left + (right - left) * (i + 0.5) / octaves.length;
    const y = (e) => top + (bottom - top) * (Math.log10(Math.max(e, 10 ** floor)) / floor);
    for (let power = 0; power >= floor; power -= 1) {
      svg.append(draw("line", { x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power), stroke: "var(--faint)" }),
        draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end", "font-size": 12, fill: "currentColor" }, `${10 ** (power + 2)} %`));
    }
    const every = Math.max(1, Math.ceil(octaves.length / (width / 60)));
    octaves.forEach((e, i) => {
      if (i % every === 0) svg.append(draw("text", { x: x(i), y: bottom + 20, "text-anchor": "middle", "font-size": 12, fill: "currentColor" }, `2^${e}`));
    });
    const legend = (width - 80) / 2;
    chosen.forEach((format, k) => {
      const stroke = k === 0 ? "var(--normal)" : "var(--subnormal)";
      const points = errors[k].map((e, i) => `${x(i)},${y(e)}`).join(" ");
      const dashes = k === 0 ? "" : "7 4";
      svg.append(draw("polyline", { points, fill: "none", stroke, "stroke-width": 2.5, "stroke-dasharray": dashes }),
        draw("line", { x1: left + 20 + legend * k, x2: left + 50 + legend * k, y1: 324, y2: 324, stroke, "stroke-width": 2.5, "stroke-dasharray": dashes }),
        draw("text", { x: left + 58 + legend * k, y: 328, "font-size": 13, fill: "currentColor" }, format.name));
    });
    $("errors").replaceChildren(svg);
  }

  // A block and its scale.

  function showBlock() {
    const block = blocks.get($("block").value);
    const [amax, tensorAmax, element] = ["amax", "tensor-amax", "element"].map((id) => numberIn($(id)));
    $("tensor-amax").disabled = !block.hasTensorScale;
    const problem = blockProblem(block, amax, tensorAmax, element);
    if (problem !== "") {
      $("block-status").textContent = problem;
      $("block-table").replaceChildren(make("caption", {}, "The element, quantized"));
      return;
    }
    const [a, t, x] = [amax, tensorAmax, element].map((v) => Math.fround(v ?? 0));
    const found = block.quantized(x, a, t);
    const rows = [["element", x], ["scale of the block", found.scale]];
    if (block.hasTensorScale) rows.push(["scale of the tensor", found.second]);
    rows.push([`in ${block.element.name}`, found.value], ["times its scale", found.result]);
    $("block-status").textContent = `${short(x)} becomes ${short(found.result)}${errorText(x, found.result)}.`;
    $("block-table").replaceChildren(
      make("caption", {}, `${block.name}: blocks of ${block.block.join(" × ")} ${block.element.name}, ` +
        `scales in ${block.scaleName} by the rule “${block.rule}”`),
      make("tbody", {}, ...rows.map(([name, value]) =>
        make("tr", {}, make("th", { scope: "row" }, name), make("td", { "data-value": value }, short(value))))));
  }

  function blockProblem(block, amax, tensorAmax, element) {
    const isSize = (v) => v !== null && Number.isFinite(v) && v >= 0;
    if (!isSize(amax)) return "The largest of the block must be a finite number, 0 or more, for example 500.";
    if (element === null || !Number.isFinite(element)) return "The element must be a finite number, for example 3.1.";
    if (Math.abs(element) > amax) return `The element is larger than the largest of its block, ${shown(amax)}; write a larger one there.`;
    if (!block.hasTensorScale) return "";
    if (!isSize(tensorAmax)) return "The largest of the tensor must be a finite number, for example 500.";
    return tensorAmax < amax ? `The largest of the tensor is less than that of its block; write ${shown(amax)} or more.` : "";
  }

  // What there is to choose, and what happens.

  function fill(select, chosen) {
    for (const group of qtoolkitFormats.groups) {
      select.append(make("optgroup", { label: group.label },
        ...group.formats.map(({ name }) => make("option", { value: name }, name))));
    }
    select.value = chosen;
  }

  for (const { formats: group } of qtoolkitFormats.groups) {
    group.forEach((fields) => formats.set(fields.name, makeFormat(fields)));
  }
  qtoolkitFormats.blocks.forEach((fields) => {
    blocks.set(fields.name, new BlockFormat(fields));
    $("block").append(make("option", { value: fields.name }, fields.name));
  });
  fill($("format"), "e4m3fn");
  fill($("first"), "e4m3fn");
  fill($("second"), "e5m2");
  ["format", "number"].forEach((id) => $(id).addEventListener("input", showNumber));
  $("code").addEventListener("input", () => {
    const code = Number($("code").value), format = formats.get($("format").value);
    if (Number.isInteger(code) && code >= 0 && code < 2 ** format.bits) choose(code);
  });
  $("codes").addEventListener("keydown", moveInCodes);
  $("codes").addEventListener("click", (event) => {
    const code = Number(event.target.dataset?.code);
    if (Number.isNaN(code)) return;
    choose(code);
    $("codes").querySelector('[aria-current="true"]')?.focus();
  });
  ["first", "second", "scaling"].forEach((id) => $(id).addEventListener("input", showErrors));
  ["block", "amax", "tensor-amax", "element"].forEach((id) => $(id).addEventListener("input", showBlock));
  window.addEventListener("resize", () => { showNumber(); showErrors(); });
  window.explorer = { formats, blocks, relativeError };
  showNumber();
  showErrors();
  showBlock();
})();
