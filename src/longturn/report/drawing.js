// Shared by every chart of the page: text of figures, SVG and HTML elements, axes, the tip.
const Draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SHAPES = ["circle", "square", "triangle", "diamond", "down", "plus"];
  const NONE = "–";
  const color = (s) => `var(--s${s % 8})`;
  const shape = (s) => SHAPES[s % SHAPES.length];

  const compact = (v) => {
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e6) return +(v / 1e6).toPrecision(4) + " M";
    if (size >= 1e5) return +(v / 1e3).toPrecision(4) + " k";
    if (size >= 1000) return Math.round(v).toLocaleString("en-US");
    return String(+v.toPrecision(size >= 100 ? 4 : 3));
  };
  // Ticks of one axis share their unit.
  const axisText = (top) => (top >= 2e6 ? (v) => (v ? +(v / 1e6).toPrecision(4) + " M" : "0") : top >= 2e4 ? (v) => (v ? +(v / 1e3).toPrecision(4) + " k" : "0") : compact);
  const time = (ms) => {
    if (ms === null || ms === undefined) return NONE;
    if (ms >= 7.2e6) return (ms / 3.6e6).toFixed(1) + " h";
    if (ms >= 6e5) return (ms / 6e4).toFixed(1) + " min";
    if (ms < 99.95) return ms.toFixed(ms < 9.995 ? 2 : 1) + " ms";
    const s = ms / 1000;
    return s.toFixed(s < 1 ? 3 : s < 10 ? 2 : 1) + " s";
  };
  const rate = (v) => (v === null || v === undefined ? NONE : v.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }));
  const percent = (v) => (v === null || v === undefined ? NONE : (100 * v).toFixed(1) + " %");
  const times = (v) => (v < 9.995 ? v.toFixed(2) : v < 99.95 ? v.toFixed(1) : v.toFixed(0)) + "×";

  function node(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  function html(name, parent, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    if (parent) parent.append(made);
    return made;
  }
  function marker(kind, x, y, r, attributes, parent) {
    const shapes = {
      circle: () => node("circle", { cx: x, cy: y, r, ...attributes }, parent),
      square: () => node("rect", { x: x - r * 0.88, y: y - r * 0.88, width: r * 1.76, height: r * 1.76, ...attributes }, parent),
      triangle: () => path([[0, -1.15], [1.1, 0.85], [-1.1, 0.85]]),
      down: () => path([[0, 1.15], [1.1, -0.85], [-1.1, -0.85]]),
      diamond: () => path([[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]]),
      plus: () => path([[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]]),
    };
    function path(corners) {
      return node("path", { d: "M" + corners.map(([dx, dy]) => `${(x + dx * r).toFixed(2)},${(y + dy * r).toFixed(2)}`).join("L") + "Z", ...attributes }, parent);
    }
    return shapes[kind]();
  }
  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= raw * 0.999);
    const values = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) values.push(+(k * step).toPrecision(12));
    return values;
  }
  function logTicks(low, high) {
    const values = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of high / low > 300 ? [1] : high / low > 12 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]) values.push(m * 10 ** e);
    }
    return values.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }
  const tip = document.getElementById("tip");
  function tell(target, lines, at) {
    tip.replaceChildren();
    html("b", tip, lines[0].join(" "));
    for (const [name, value] of lines.slice(1)) {
      const row = html("div", tip);
      html("span", row, name);
      html("span", row, value);
    }
    tip.hidden = false;
    const place = at || target.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const x = Math.min(Math.max(8, place.left + place.width / 2 - tip.offsetWidth / 2), wide - tip.offsetWidth - 8);
    const above = place.top - tip.offsetHeight - 10;
    tip.style.left = `${x + window.scrollX}px`;
    tip.style.top = `${(above > 4 ? above : place.top + place.height + 10) + window.scrollY}px`;
  }
  function hide() { tip.hidden = true; }

  return { SVG, NONE, color, shape, compact, axisText, time, rate, percent, times, node, html, marker, ticks, logTicks, tell, hide };
})();
