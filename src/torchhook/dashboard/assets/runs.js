// The cells of the table of runs, and what its search box and its link to the comparison do.
const element = React.createElement;

window.dashAgGridComponentFunctions = {
  ...window.dashAgGridComponentFunctions,
  RunLink: ({ data }) => element(dash_core_components.Link, { href: data.href, className: "name" }, data.shown),
  RunState: ({ data }) => element("span", { className: `pill ${data.look ?? ""}` }, data.state),
  RunFinding: ({ data }) =>
    data.finding ? element("span", { className: `finding ${data.severity}` }, data.finding) : null,
  RunCurve: ({ data }) => (data.losses?.length ? curve(data.losses) : null),
};

// Non-finite losses are ticks across the whole height.
function curve(losses) {
  const wide = 120 / Math.max(1, losses.length - 1), at = (i) => (i * wide).toFixed(1);
  const line = losses.map((y, i) => (y === null ? "" : `${i && losses[i - 1] !== null ? "L" : "M"}${at(i)} ${26 - y}`));
  const odd = losses.map((y, i) => (y === null ? `M${at(i)} 2V26` : ""));
  return element(
    "svg", { className: "curve", viewBox: "-2 0 124 28", role: "img", "aria-label": "loss by step" },
    element("path", { d: line.join("") }), element("path", { d: odd.join(""), className: "odd" }),
  );
}

window.dashAgGridFunctions = window.dashAgGridFunctions ?? {};
dashAgGridFunctions.runs = {
  order: (a, b, one, other, down) =>  // what is not finite, or not known, comes last in both directions
    a == null || b == null ? ((a == null) - (b == null)) * (down ? -1 : 1) : a - b,
  loss: ({ data, value }) => (data.is_broken ? "not finite" : value?.toPrecision(4) ?? ""),
  step: ({ value }) => value?.toLocaleString("en") ?? "",
  started: ({ value }) => new Date(1000 * value).toLocaleString("sv").slice(0, 16),
  duration: ({ value }) => {
    if (value == null) return "";
    const s = Math.round(value), m = Math.floor(s / 60), h = Math.floor(m / 60);
    return h ? `${h} h ${m % 60} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
  },
};

window.dash_clientside = window.dash_clientside ?? {};
dash_clientside.runs = {
  search: (text) => {
    dash_ag_grid.getApi("runs-grid")?.setGridOption("quickFilterText", text ?? "");
  },
  compare: (rows) => {
    const runs = (rows ?? []).map(({ name }) => ["run", name]);
    const text = runs.length ? `Compare ${runs.length} run${runs.length > 1 ? "s" : ""}` : "Select runs to compare";
    return [`/compare?${new URLSearchParams(runs)}`, text];
  },
};

// In the table, arrow keys move from cell to cell; Enter opens the run.
document.addEventListener("keydown", ({ key, target }) => {
  if (key === "Enter" && target.closest?.("#runs-grid")) target.querySelector("a")?.click();
});
