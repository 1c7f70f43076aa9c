// Begins: asks what the server has, and shows the sections for it.

import { getJson } from "./api.js";
import { byId } from "./dom.js";
import { askForKey, storedKey } from "./key.js";
import { makers, setUpMake } from "./make.js";
import { notice } from "./notices.js";
import { watchStages } from "./stages.js";
import { setUpTalk } from "./talk.js";
import { loadVoices, setUpVoices } from "./voices.js";

const AGAIN_MS = 2000;
const links = [...document.querySelectorAll("nav a")];
const sections = links.map((link) => document.querySelector(link.hash));

// Shows the section that the address names, or else the first there is.
function navigate() {
  const there = links.filter((link) => !link.hidden);
  const current = there.find((link) => link.hash === location.hash) ?? there[0];
  for (const section of sections) section.hidden = `#${section.id}` !== current.hash;
  for (const link of links) {
    if (link === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

const isOffered = (id) => !links.find((link) => link.hash === `#${id}`).hidden;

function offer(id, setUp) {
  if (isOffered(id)) return;
  setUp();
  links.find((link) => link.hash === `#${id}`).hidden = false;
}

// Offers what there is a model for; a stage that starts is asked again until it is there.
async function begin() {
  for (let isReady = false; !isReady; ) {
    isReady = (await fetch("/ready")).status !== 503;
    const { data } = await getJson("/v1/models");
    await offerAnswers(data.find((model) => "voices" in model.quartet), isReady);
    const kinds = makers(data);
    if (kinds.length) offer("make", () => setUpMake(kinds));
    navigate();
    if (!isReady) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
  document.body.dataset.ready = "true";
}

async function offerAnswers(model, isReady) {
  if (!model) return;
  const { output_modalities: made, voices: own, sample_rate_hz: rateHz, max_speech_characters: reads } = model.quartet;
  const speaks = made.includes("audio");
  if (speaks && !isReady && !(own.length && rateHz)) return; // its voices are not known yet
  const voices = speaks ? await loadVoices() : [];
  if (made.includes("text")) offer("talk", () => setUpTalk(model, voices));
  if (reads) offer("voices", () => setUpVoices(model, voices));
}

async function changeKey() {
  try {
    await askForKey("Enter another API key.");
    location.reload(); // what was set up with the other one is gone
  } catch {
    // the user keeps the one that there is
  }
}

byId("change-key").hidden = !storedKey();
byId("change-key").addEventListener("click", changeKey);
addEventListener("hashchange", navigate);
navigate();
watchStages();
begin().catch(notice);
