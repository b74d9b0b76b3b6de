// Name each slider after its label, and its value by the words beside it, and the document after its page: Dash does not.
new MutationObserver(() => {
  for (const slider of document.querySelectorAll('.choice.slider [role="slider"]')) {
    const label = slider.closest("label");
    slider.setAttribute("aria-label", label.title);
    slider.setAttribute("aria-valuetext", label.querySelector("span").textContent);
  }
  const words = ["#where h1", "#where nav .current"].map((part) => document.querySelector(part)?.textContent);
  const title = [...words.filter(Boolean), "torchhook"].join(" · ");
  if (document.title !== title) document.title = title;
}).observe(document, { childList: true, subtree: true, characterData: true });

// Executing plotly.js takes a few tenths of a second. It is loaded as soon as the frame exists, while the server makes
// the page inside it; the list of runs has no figures, so its rows come first. Until then, window.Plotly is a promise
// that Dash waits for.
new MutationObserver((_, observer) => {
  const isList = location.pathname === "/" && document.body.classList.contains("folder");
  if (!document.querySelector(isList ? ".ag-row a" : "#page")) return;
  observer.disconnect();
  const script = document.createElement("script");
  script.src = "/plotly.js";
  script.onload = () => plotlyLoaded(window.Plotly);
  document.head.append(script);
}).observe(document, { childList: true, subtree: true });

// The tree of modules; a new one keeps what was folded. Names come from runs of others: they are text, never markup.
function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function branches(modules, folded) {
  return made("ul", {}, ...modules.map(({ name, fact, worst, open, href, inside }) => {
    const dot = made("span", { className: `dot ${worst || "healthy"}`, role: "img", ariaLabel: worst || "nothing found" });
    const text = href ? made("a", { href }, name) : name;
    const line = [dot, text, made("span", { className: "quiet" }, " ", fact)];
    if (!inside.length) return made("li", {}, ...line);
    const block = made("details", { open: folded.get(name) ?? open }, made("summary", {}, ...line));
    block.dataset.name = name;
    block.append(branches(inside, folded));
    return made("li", {}, block);
  }));
}

window.dash_clientside = Object.assign({}, window.dash_clientside, {
  torchhook: {
    tree(modules) {
      const tree = document.getElementById("tree");
      const folded = new Map([...tree.querySelectorAll("details")].map((block) => [block.dataset.name, block.open]));
      tree.replaceChildren(branches(modules, folded));
      return "tree";
    },
  },
});
