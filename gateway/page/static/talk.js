// The section "Talk": its buttons, its message, its settings.

import { Attachments } from "./attachments.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { showLevel } from "./level.js";
import { notice, telling } from "./notices.js";
import { hear } from "./voices.js";

const KEPT = "quartet-instructions";

// `model` is its entry in /v1/models, `voices` those of /v1/audio/voices.
export function setUpTalk(model, voices) {
  const settings = setUpSettings(model, voices);
  const conversation = new Conversation(settings, {
    onState: (text) => showState(conversation, text),
    onUserLevel: (rms) => showLevel(byId("your-level"), rms),
    onModelLevel: (rms) => showLevel(byId("model-level"), rms),
  });
  setUpMicrophone(conversation);
  setUpMessage(conversation);
  for (const name of ["voice", "answers", "instructions", "transcribe"]) {
    byId(name).addEventListener("change", telling(() => conversation.settle()));
  }
  byId("restart").addEventListener("click", telling(() => conversation.restart()));
  const stop = telling(() => conversation.interrupt());
  byId("hush").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("talk").hidden && conversation.answering) stop();
  });
}

function showState(conversation, text) {
  const microphone = byId("microphone");
  byId("state").textContent = text;
  byId("transport").textContent = conversation?.transport ? `Sound by ${conversation.transport}` : "";
  byId("hush").disabled = !conversation?.answering;
  microphone.setAttribute("aria-pressed", String(Boolean(conversation?.talking)));
  microphone.textContent = conversation?.talking ? "Stop talking" : "Talk";
}

function setUpMicrophone(conversation) {
  byId("microphone").addEventListener("click", telling(() => (conversation.talking ? conversation.hush() : conversation.talk())));
}

function setUpMessage(conversation) {
  const message = byId("message"), form = byId("composer"), attachments = new Attachments();
  const fit = () => {
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight + 2}px`;
  };
  message.addEventListener("input", fit);
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const written = message.value.trim();
    message.value = "";
    fit();
    try {
      const { images, media, text } = await attachments.take();
      const all = (written + text).trim();
      if (all || images.length || media.length) await conversation.say(all, images, media);
    } catch (error) {
      if (error.name !== "AbortError") message.value ||= written; // to try again
      notice(error);
    }
  });
}

// Fills the settings, and returns what reads them.
function setUpSettings(model, voices) {
  const facts = model.quartet, speaks = facts.output_modalities.includes("audio");
  const voice = byId("voice"), instructions = byId("instructions"), details = byId("settings");
  voice.replaceChildren(...voices.map(({ name }) => new Option(name, name)));
  byId("voice-field").hidden = !voices.length;
  byId("answers").hidden = !speaks;
  byId("hear").hidden = !facts.max_speech_characters;
  byId("hear").addEventListener("click", telling(() => hear(model.id, voice.value)));
  instructions.value = sessionStorage.getItem(KEPT) ?? "";
  instructions.addEventListener("change", () => sessionStorage.setItem(KEPT, instructions.value));
  details.open = matchMedia("(min-width: 60rem)").matches;
  return () => ({
    model: model.id,
    voice: voice.value,
    modality: speaks ? document.querySelector("input[name=modality]:checked").value : "text",
    instructions: instructions.value.trim(),
    transcribe: byId("transcribe").checked,
    rateHz: facts.sample_rate_hz,
    takesCalls: facts.webrtc,
  });
}
