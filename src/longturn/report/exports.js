// What leaves the page: CSV of the points, PNG of the chart.
const Exports = (() => {
  const { SVG, node, marker, shape } = Draw;
  const { STATISTICS, spread, perMoney, perJoule } = Figures;

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  const fileName = (title, end) => (title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "report") + end;

  // Text of the CSV file: a row for each point of the configurations shown.
  function rows({ series, points }, shown, currency) {
    const spreads = [["ttft_ms", "TTFT"], ["itl_ms", "ITL"], ["e2e_ms", "end to end"], ["jobs", "job time"]];
    const head = ["curve", "configuration", "source", "valid", "reasons", "engine", "model", "quantisation", "chip", "chips", "live trees", "traces", "seed", "speculation", "created"];
    for (const [, name] of STATISTICS) head.push(`interactivity ${name} tok/s`);
    for (const [, what] of spreads) for (const [, name] of STATISTICS) head.push(`${what} ${name} ms`);
    head.push("total tok/s per chip", "input tok/s per chip", "cached tok/s per chip", "output tok/s per chip", "hit rate", "possible hit rate", "requests", "errors", `cost per million tokens ${currency}`, "tokens per joule", "command");
    const lines = [head];
    series.forEach((one, s) => {
      if (!shown[s]) return;
      for (const i of one.points) {
        const p = points[i];
        const m = p.metrics;
        const per = p.platform.currency === currency ? perMoney(p) : null;
        lines.push([one.name, p.configuration, p.source, p.validity.valid ? "yes" : "no", p.validity.reasons.join("; "), `${p.engine.name} ${p.engine.version}`, p.model.name, p.model.quantisation, p.platform.chip, p.platform.chips,
          p.concurrency, p.traces.name, p.traces.seed, p.speculation.mode, p.created,
          ...STATISTICS.map(([id]) => m.interactivity && m.interactivity[id]),
          ...spreads.flatMap(([field]) => STATISTICS.map(([id]) => { const d = spread(p, field); return d && d[id]; })),
          m.total_tokens_per_s, m.input_tokens_per_s, m.cached_tokens_per_s, m.output_tokens_per_s, m.hit_rate, m.theoretical_hit_rate, m.requests, m.errors, per ? 1e6 / per : null, perJoule(p), p.command]);
      }
    });
    // A spreadsheet runs text that starts like a formula; an apostrophe keeps it text.
    const cell = (v) => (v === null || v === undefined ? "" : typeof v === "number" ? String(v) : `"${(/^[=+\-@\t\r]/.test(v) ? "'" + v : v).replace(/"/g, '""')}"`);
    return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  // The chart as an SVG that stands alone: the page's styles written into each element, a background and the names below.
  function picture({ title, series }, shown, source) {
    const PROPERTIES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor", "visibility", "paint-order", "stroke-linejoin"];
    const copy = source.cloneNode(true);
    const originals = [source, ...source.querySelectorAll("*")];
    [copy, ...copy.querySelectorAll("*")].forEach((element, k) => {
      const style = getComputedStyle(originals[k]);
      for (const name of PROPERTIES) element.style.setProperty(name, style.getPropertyValue(name));
    });
    const [, , width, height] = source.getAttribute("viewBox").split(" ").map(Number);
    const page = getComputedStyle(document.documentElement);
    const font = { "font-family": "system-ui, sans-serif", fill: page.getPropertyValue("--ink") };
    const names = series.map((one, s) => ({ name: one.name, s })).filter(({ s }) => shown[s]);
    const whole = { w: width + 32, h: height + 62 + 20 * names.length };
    const out = node("svg", { xmlns: SVG, width: whole.w, height: whole.h, viewBox: `0 0 ${whole.w} ${whole.h}` });
    node("rect", { width: whole.w, height: whole.h, fill: page.getPropertyValue("--panel") }, out);
    node("text", { x: 16, y: 28, "font-size": 16, "font-weight": 700, ...font }, out, title);
    const shifted = node("g", { transform: "translate(16,42)" }, out);
    copy.setAttribute("width", width);
    shifted.append(copy);
    names.forEach(({ name, s }, k) => {
      const y = height + 58 + 20 * k;
      const paint = page.getPropertyValue(`--s${s % 8}`);
      marker(shape(s), 24, y - 4, 5, { fill: paint }, out);
      node("text", { x: 38, y, "font-size": 13, ...font }, out, name);
    });
    return { text: new XMLSerializer().serializeToString(out), ...whole };
  }

  function csv(data, shown, currency) {
    // The mark at the start tells spreadsheets that the text is UTF-8.
    save(new Blob(["\ufeff" + rows(data, shown, currency)], { type: "text/csv" }), fileName(data.title, ".csv"));
  }
  function png(data, shown, chart) {
    const { text, w, h } = picture(data, shown, chart);
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = w * 2;
      canvas.height = h * 2;
      const context = canvas.getContext("2d");
      context.scale(2, 2);
      context.drawImage(image, 0, 0, w, h);
      canvas.toBlob((blob) => save(blob, fileName(data.title, ".png")), "image/png");
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  }
  return { csv, png };
})();
