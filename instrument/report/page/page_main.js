// The page: its head, its summary, what was left out; and each part in turn.

function startSummary() {
  const { about } = report;
  byId("service").textContent = about.service || "Trace";
  const origin = [about.header, about.host && `host ${about.host}`, about.pid > 0 && !about.header && `process ${about.pid}`,
    about.began && `began ${about.began}`, `window ${about.window}`, counted(about.spans, "span"), about.recorder && `${about.recorder} recorder`];
  byId("origin").textContent = origin.filter(Boolean).join(" · ");
  byId("origin").title = byId("origin").textContent;
  if (about.died) {
    byId("died").hidden = false;
    byId("died").textContent = about.died;
  }
  for (const { label, value, note, mood } of report.figures) {
    byId("figures").append(element("div", { class: mood || null }, element("dt", {}, label), element("dd", { class: "value" }, value),
      element("dd", { class: "note", title: note }, note)));
  }
  for (const endpoint of report.endpoints) byId("endpoints").append(endpointNode(endpoint));
  byId("text").textContent = report.text;
  byId("copy-text").addEventListener("click", async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(report.text);
    } catch {
      getSelection().selectAllChildren(byId("text"));
      said = "Selected: copy it";
    }
    byId("copy-text").textContent = said;
  });
  const left = report.left_out.length ? report.left_out : ["Nothing: all spans, and all rows of all tables, are in this page."];
  byId("left-out").append(...left.map((one) => element("li", {}, one)));
  byId("instrumentation").textContent = report.instrumentation.join("\n") || "The trace does not say it.";
}

/** An endpoint and what the walls of its requests went to. */
function endpointNode({ name, requests, times, parts }) {
  const list = element("ul", { class: "parts" });
  for (const [part, , share, mean] of parts) {
    list.append(element("li", {}, swatch(partColour(part)), element("span", { class: "n", title: part }, part),
      element("span", { class: "v" }, mean), element("span", { class: "r" }, share)));
  }
  const [mean, p50, p99] = times;
  return element("div", { class: "endpoint" },
    element("header", {}, element("b", {}, name),
      element("span", { class: "muted" }, `${requests} requests · mean ${mean} ${unit} · p50 ${p50} · p99 ${p99}`)),
    stack(parts.map(([part, ratio, share]) => [part, ratio, share])), list);
}

/** Mark the section that is being read. */
function startNavigation() {
  const links = new Map([...document.querySelectorAll(".top nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target.id);
    const current = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "location");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-110px 0px -55% 0px" });
  for (const id of links.keys()) observer.observe(byId(id));
}

startTheme();
startSummary();
startRequests();
startCalls();
startDevices();
startViews();
startNavigation();
document.documentElement.dataset.ready = "true";
