// Which figures of a point a reader can choose, and how they come from its record.
const Figures = (() => {
  const STATISTICS = [["mean", "Mean"], ["p50", "P50"], ["p75", "P75"], ["p90", "P90"], ["p95", "P95"], ["p99", "P99"]];
  const known = (v) => (v === null || v === undefined ? null : v);
  const spread = (p, field) => (field === "jobs" ? p.metrics.jobs && p.metrics.jobs.time_ms : p.metrics[field]) || null;
  const figure = (p, field, statistic) => { const s = field === "interactivity" ? p.metrics.interactivity : spread(p, field); return s ? known(s[statistic]) : null; };
  const seconds = (field) => (p, statistic) => { const ms = figure(p, field, statistic); return ms === null ? null : ms / 1000; };

  const perMoney = (p) => (p.metrics.total_tokens_per_s > 0 && p.platform.price_per_chip_hour > 0 ? (p.metrics.total_tokens_per_s * 3600) / p.platform.price_per_chip_hour : null);
  const perJoule = (p) => (p.metrics.total_tokens_per_s > 0 && p.platform.power_w_per_chip > 0 ? p.metrics.total_tokens_per_s / p.platform.power_w_per_chip : null);
  const currency = (points) => (points.find((p) => p.platform.price_per_chip_hour !== null) || points[0]).platform.currency;

  const X_AXES = [
    { id: "interactivity", name: "Interactivity", unit: "tok/s per user", of: (p, statistic) => figure(p, "interactivity", statistic), lower: false },
    { id: "e2e_ms", name: "End to end", unit: "s", of: seconds("e2e_ms"), lower: true },
    { id: "ttft_ms", name: "TTFT", unit: "s", of: seconds("ttft_ms"), lower: true },
    { id: "jobs", name: "Job time", unit: "s", of: seconds("jobs"), lower: true },
  ];
  // Prices in another currency than the page's stay off its axis.
  const yAxes = (money) => [
    { id: "total", name: "Total throughput", unit: "tok/s per chip", of: (p) => p.metrics.total_tokens_per_s },
    { id: "output", name: "Output throughput", unit: "tok/s per chip", of: (p) => p.metrics.output_tokens_per_s },
    { id: "input", name: "Input throughput", unit: "tok/s per chip", of: (p) => p.metrics.input_tokens_per_s },
    { id: "cached", name: "Cached input", unit: "tok/s per chip", of: (p) => p.metrics.cached_tokens_per_s },
    { id: "jobs", name: "Jobs", unit: "per hour and chip", of: (p) => p.metrics.jobs && p.metrics.jobs.per_hour_per_chip },
    { id: "money", name: "Total tokens", unit: `per ${money}`, of: (p) => (p.platform.currency === money ? perMoney(p) : null) },
    { id: "joule", name: "Total tokens", unit: "per joule", of: perJoule },
  ];
  return { STATISTICS, X_AXES, yAxes, spread, figure, perMoney, perJoule, currency };
})();
