// The stages: their replicas, health and queues, by what /ready tells.

import { byId, make } from "./dom.js";

const SEEN_MS = 1000, UNSEEN_MS = 10_000;

// Looks for ever: often while the section is seen, else for the word in the page's head.
export async function watchStages() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, byId("stages").hidden ? UNSEEN_MS : SEEN_MS));
  }
}

async function look() {
  try {
    const response = await fetch("/ready");
    show(await response.json());
  } catch {
    health("no answer", "bad");
    byId("stages-note").textContent = "The server does not tell this page of its stages: it is not reached, or a proxy keeps /ready to itself.";
    byId("stage-table").hidden = true;
  }
}

function show({ status, stages, replicas }) {
  health(status, status === "ready" ? "good" : "bad");
  if (byId("stages").hidden) return;
  byId("stage-table").hidden = false;
  byId("stages-note").textContent = "";
  const rows = Object.entries(stages).flatMap(([name, state]) => {
    const all = replicas[name].length ? replicas[name] : [{ address: "none", state, running: 0, queued: 0 }];
    return all.map((replica, i) => row(i ? "" : name, replica));
  });
  byId("stage-table").tBodies[0].replaceChildren(...rows);
}

function row(name, { address, state, running, queued }) {
  const isGood = state === "SERVING";
  const told = make("td", { className: isGood ? "good" : "bad", textContent: isGood ? "serving" : state });
  const cells = [running, queued, address].map((value) => make("td", { textContent: value ?? "" }));
  return make("tr", {}, make("th", { scope: "row", textContent: name }), told, ...cells);
}

function health(text, kind) {
  const shown = byId("health");
  if (shown.textContent !== text) shown.textContent = text;
  shown.className = `health ${kind}`;
}
