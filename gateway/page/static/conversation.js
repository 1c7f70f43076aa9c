// A conversation: what the user says, types and shows goes to the model, what it answers is played and written down.

import { completion } from "./completion.js";
import { seconds } from "./dom.js";
import { History, itemOf } from "./history.js";
import { notice } from "./notices.js";
import { Player } from "./player.js";
import { RealtimeSession } from "./session.js";
import { Transcript } from "./transcript.js";
import { Microphone } from "./microphone.js";

export class Conversation {
  #history = new History();
  #transcript = new Transcript();
  #microphone = new Microphone();
  #player = new Player();
  #session = null;
  #opening = null;
  #talking = false;
  #waiting = new Map(); // since when the user waits, by the answer's id; null: by the next one
  #running = null; // ends a chat completion
  #typed = 0;

  // `settings()` gives {voice, modality, instructions, transcribe, model, rateHz, takesCalls}; the others are told of what goes on.
  constructor(settings, { onState, onUserLevel, onModelLevel }) {
    Object.assign(this, { settings, onState, onUserLevel, onModelLevel });
    this.#player.onLevel = onModelLevel;
    this.#player.onStarted = (id, at) => this.#firstHeard(id, at);
    this.#player.onEnded = (id, ms) => this.#played(id, ms);
  }

  // How sound goes: "WebRTC" or "WebSocket"; "" without a session.
  get transport() {
    return this.#session ? (this.#session.isCall ? "WebRTC" : "WebSocket") : "";
  }

  #played(id, ms) {
    this.#transcript.fact(id, "played", `${seconds(ms)} heard`, ms);
    this.#tellState();
  }

  get talking() {
    return this.#talking;
  }

  // Whether there is an answer to stop.
  get answering() {
    return this.#player.playing || Boolean(this.#session?.answering || this.#session?.playing || this.#running);
  }

  async talk() {
    this.#talking = true;
    this.#tellState("Connecting ...");
    try {
      await this.#player.open();
      await this.#connected();
      await this.#microphone.open((pcm, rms) => {
        this.onUserLevel(rms);
        this.#session?.hear(pcm);
      });
      await this.#session?.listen(this.#microphone.track);
    } catch (error) {
      this.hush();
      throw error;
    }
    if (!this.#talking) this.#microphone.close(); // stopped meanwhile
    this.#tellState();
  }

  // The microphone off; what was being said is answered.
  hush() {
    this.#talking = false;
    this.#microphone.close();
    this.onUserLevel(0);
    this.#session?.endTurn();
    this.#tellState();
  }

  // A message, with pictures as data URLs, and films and sounds as {name, part} with chats' content parts.
  async say(text, images = [], media = []) {
    await this.#player.open();
    await this.interrupt();
    const since = performance.now();
    const id = `typed-${++this.#typed}`;
    this.#transcript.add(id, "user", { text, images, files: media.map(({ name }) => name) });
    if (!media.length && !this.#history.hasMedia) await this.#connected();
    const entry = this.#history.add({ role: "user", text, images, media });
    this.#waiting.set(null, since);
    if (media.length || this.#history.hasMedia) await this.#complete(entry);
    else this.#session.ask(itemOf(entry));
    this.#tellState();
  }

  // Ends the answer that goes on: silence at once, and the server learns what was heard of it.
  async interrupt() {
    this.#running?.abort();
    this.#session?.cancel();
    await this.#silence();
  }

  // New settings, from the next answer on.
  async settle() {
    if (!this.#session) return;
    if (this.#session.hasSpoken && this.#session.voice !== this.settings().voice) await this.#anew();
    else this.#session.settle(this.settings());
  }

  // Forgets all of it.
  async restart() {
    if (this.#talking) this.hush();
    await this.interrupt();
    this.#session?.close();
    this.#session = null;
    this.#history.clear();
    this.#transcript.clear();
    this.#tellState();
  }

  // A session cannot change its voice once it has spoken: another one takes over.
  async #anew() {
    await this.interrupt();
    this.#session?.close();
    this.#session = null;
    await this.#connected();
  }

  #connected() {
    if (this.#session) return Promise.resolve();
    this.#opening ??= this.#connect().finally(() => (this.#opening = null));
    return this.#opening;
  }

  async #connect() {
    const session = new RealtimeSession({
      onTurn: (id) => this.#heardUser(id),
      onTurnEnd: (id, at) => this.#userWaits(id, at),
      onTurnVoid: (id) => this.#transcript.remove(id),
      onUserText: (id, text, isAll) => this.#userSaid(id, text, isAll),
      onAnswer: (id) => this.#answer(id),
      onText: (id, text, isWritten) => this.#modelSaid(id, text, isWritten),
      onSound: (id, samples) => this.#player.add(id, samples),
      onSoundEnd: (id) => this.#player.end(id),
      onStarted: (id, at) => this.#firstHeard(id, at),
      onPlayed: (id, ms) => this.#played(id, ms),
      onCut: (id, ms) => this.#cut(id, ms),
      onLevel: (rms) => this.onModelLevel(rms),
      onAnswerEnd: (id, status, why) => this.#answered(id, status, why),
      onHeard: (id, text) => this.#heardModel(id, text),
      onError: notice,
      onChange: () => this.#tellState(),
      onClose: (why) => this.#closed(session, why),
    });
    await session.open(this.settings(), this.#history.items());
    this.#session = session;
    if (this.#talking) await session.listen(this.#microphone.track);
  }

  #closed(session, why) {
    if (session !== this.#session) return;
    this.#session = null;
    if (this.#talking) this.hush();
    this.#tellState();
    if (why) notice(why);
  }

  async #silence() {
    for (const { id, ms } of await this.#player.stop()) {
      this.#session?.truncate(id, ms);
      this.#cut(id, ms);
    }
    this.#session?.silence();
    this.#tellState();
  }

  #cut(id, ms) {
    this.#transcript.fact(id, "played", `interrupted after ${seconds(ms)}`, ms);
    this.#transcript.busy(id, false);
  }

  #heardUser(id) {
    this.#running?.abort();
    this.#silence().catch(notice);
    this.#transcript.add(id, "user", { busy: true });
    this.#transcript.hint(id, "listening ...");
  }

  #userWaits(id, at) {
    this.#waiting.set(null, at);
    this.#transcript.hint(id, "spoken");
    this.#transcript.busy(id, false);
    this.#history.add({ role: "user", itemId: id });
  }

  #userSaid(id, text, isAll) {
    const entry = this.#history.find(id);
    if (!entry) return;
    entry.text = isAll ? text : entry.text + text;
    this.#transcript.set(id, entry.text);
  }

  #answer(id) {
    if (this.#waiting.has(null)) this.#waiting.set(id, this.#waiting.get(null));
    this.#waiting.delete(null);
    this.#history.add({ role: "assistant", itemId: id });
    this.#transcript.add(id, "assistant", { busy: true });
  }

  #modelSaid(id, text, isWritten) {
    const entry = this.#history.find(id);
    if (!entry) return;
    if (isWritten) this.#first(id, performance.now(), "to the first word");
    entry.text += text;
    this.#transcript.append(id, text);
  }

  #firstHeard(id, at) {
    this.#first(id, at, "to the first sound");
    this.#tellState();
  }

  #first(id, at, what) {
    if (!this.#waiting.has(id)) return;
    const ms = Math.max(0, Math.round(at - this.#waiting.get(id)));
    this.#waiting.delete(id);
    this.#transcript.fact(id, "latency", `${seconds(ms)} ${what}`, ms);
  }

  #answered(id, status, why) {
    if (id) this.#transcript.busy(id, false);
    if (status === "failed") notice(why || "The answer failed; the server's log says why.");
    if (status === "incomplete" && id) this.#transcript.fact(id, "ended", "ended at its most tokens", status);
    this.#tellState();
  }

  #heardModel(id, text) {
    const entry = this.#history.find(id);
    if (entry) entry.text = text;
    this.#transcript.heard(id, text);
  }

  // Realtime sessions have no films: a chat is asked, and the session is told of both.
  async #complete(asked) {
    const id = `chat-${this.#typed}`, settings = this.settings();
    const running = (this.#running = new AbortController());
    const request = { messages: this.#history.messages(settings.instructions), settings, signal: running.signal };
    this.#answer(id);
    this.#tellState();
    try {
      for await (const { text, samples } of completion(request)) {
        if (running.signal.aborted) break;
        if (text) this.#modelSaid(id, text, settings.modality === "text");
        if (samples) await this.#player.add(id, samples);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      if (this.#running === running) this.#running = null;
      await this.#player.end(id);
      this.#answered(id, "completed");
      const answer = this.#history.find(id);
      for (const entry of [asked, answer]) if (entry?.text || entry?.media.length) this.#session?.tell(itemOf(entry));
      if (!answer?.text) this.#transcript.remove(id);
    }
  }

  #tellState(text) {
    const { userSpeaks } = this.#session ?? {};
    const now = userSpeaks ? "Listening ..." : this.#player.playing || this.#session?.playing ? "Answering ..." : this.answering ? "Thinking ..." : this.#talking ? "Speak when you like." : "";
    this.onState(text ?? now);
  }
}
