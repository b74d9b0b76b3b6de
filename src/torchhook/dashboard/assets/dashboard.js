// Name each slider after its label: Dash does not.
new MutationObserver(() => {
  for (const slider of document.querySelectorAll('[role="slider"]:not([aria-label])'))
    slider.setAttribute("aria-label", slider.closest("label")?.getAttribute("title") ?? "step");
}).observe(document, { childList: true, subtree: true });

// Executing plotly.js takes a few tenths of a second. It is loaded as soon as the frame exists, while the server makes
// the page inside it. Until then, window.Plotly is a promise that Dash waits for.
new MutationObserver((_, observer) => {
  if (!document.getElementById("page")) return;
  observer.disconnect();
  const script = document.createElement("script");
  script.src = "/plotly.js";
  script.onload = () => plotlyLoaded(window.Plotly);
  document.head.append(script);
}).observe(document, { childList: true, subtree: true });
