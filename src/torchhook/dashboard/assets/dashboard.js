// A slider is called what its label says: Dash gives it no name of its own.
new MutationObserver(() => {
  for (const slider of document.querySelectorAll('[role="slider"]:not([aria-label])'))
    slider.setAttribute("aria-label", slider.closest("label")?.getAttribute("title") ?? "step");
}).observe(document, { childList: true, subtree: true });

// plotly.js takes some tenths of a second to be executed: that is done while the server makes the page that goes into
// the frame, once this is there. Until then Plotly is a promise of itself, which Dash waits for.
new MutationObserver((_, observer) => {
  if (!document.getElementById("page")) return;
  observer.disconnect();
  const script = document.createElement("script");
  script.src = "/plotly.js";
  script.onload = () => plotlyCame(window.Plotly);
  document.head.append(script);
}).observe(document, { childList: true, subtree: true });
