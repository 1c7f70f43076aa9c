// One realtime session: its events become calls, and calls become events.

import { openCall } from "./call.js";
import { openSocket } from "./socket.js";
import { RATE_HZ, fromBase64, toBase64, toFloats } from "./pcm.js";

const CHUNK_BYTES_PER_MS = (RATE_HZ * 2) / 1000;
const NO_HARM = new Set(["response_cancel_not_active"]); // it had just ended

export class RealtimeSession {
  #socket = null;
  #silenced = new Set(); // answers that are not to be heard any more
  #responses = new Map(); // those that run, and their messages' ids
  #sentMs = 0; // of the microphone
  #clockMs = Infinity; // page's time of the session's first sample of sound: the earliest that any chunk shows
  #silenceMs = 0; // that ends a turn
  #turn = null; // id of the user's message that goes on
  #committedAt = null; // when this page ended a turn, until the server says so
  #spoken = new Map(); // messages' ids by their responses', which may be played when they are done
  #heard = new Map(); // answers that a call plays: {item, since} by the response's id
  #begun = null; // settles when the server has begun the session, or never will

  hasSpoken = false;
  voice = null;

  // `handlers`: see Conversation, which has them all.
  constructor(handlers) {
    this.on = handlers;
  }

  async open(settings, items) {
    const created = new Promise((resolve, reject) => (this.#begun = { resolve, reject }));
    const take = (event) => this.#take(event);
    const closed = (why) => {
      this.#begun.reject(new Error(why ?? "closed"));
      this.#turnVoid();
      this.on.onClose(why);
    };
    const called = settings.takesCalls ? await openCall(take, closed, this.on.onLevel) : null;
    this.#socket = called ?? (await openSocket(take, closed));
    await created;
    this.settle(settings);
    for (const item of items) this.tell(item);
  }

  settle({ voice, modality, instructions, transcribe, model }) {
    this.voice = voice;
    const input = { transcription: transcribe ? { model } : null, turn_detection: { type: "server_vad" } };
    const output = voice && !this.hasSpoken ? { voice } : {};
    const session = { type: "realtime", output_modalities: [modality], instructions, audio: { input, output } };
    this.#send("session.update", { session });
  }

  close() {
    this.#socket.close();
  }

  // Whether sound goes by WebRTC: then the server plays the answers.
  get isCall() {
    return Boolean(this.#socket?.isCall);
  }

  get playing() {
    return this.#heard.size > 0;
  }

  // What the microphone hears goes to the server; null: nothing does.
  listen(track) {
    return this.#socket?.speak?.(track);
  }

  // Silence at once. The server knows what was heard.
  silence() {
    if (this.playing) this.#send("output_audio_buffer.clear");
  }

  get answering() {
    return this.#responses.size > 0;
  }

  get userSpeaks() {
    return this.#turn !== null;
  }

  // A chunk of the microphone's PCM16, just now.
  hear(pcm) {
    if (this.isCall) return;
    this.#sentMs += pcm.length / CHUNK_BYTES_PER_MS;
    this.#clockMs = Math.min(this.#clockMs, performance.now() - this.#sentMs);
    this.#send("input_audio_buffer.append", { audio: toBase64(pcm) });
  }

  // The microphone goes off: there will be no silence that ends the turn.
  endTurn() {
    this.listen(null);
    this.#clockMs = Infinity;
    if (this.#turn === null) {
      if (this.#sentMs || this.isCall) this.#send("input_audio_buffer.clear");
      return;
    }
    this.#turnVoid(); // its message gets another id
    this.#committedAt = performance.now();
    this.#send("input_audio_buffer.commit");
    this.#send("response.create");
  }

  // Puts an item into the conversation.
  tell(item) {
    this.#send("conversation.item.create", { item });
  }

  // And has it answered.
  ask(item) {
    this.tell(item);
    this.#send("response.create");
  }

  cancel() {
    for (const [response, item] of this.#responses) {
      this.#send("response.cancel", { response_id: response });
      if (item) this.#silenced.add(item);
    }
  }

  // The user heard so much of an answer, and will hear no more.
  truncate(itemId, ms) {
    this.#silenced.add(itemId);
    if (itemId.startsWith("chat-")) return; // it is not this session's
    this.#send("conversation.item.truncate", { item_id: itemId, content_index: 0, audio_end_ms: ms });
    this.#send("conversation.item.retrieve", { item_id: itemId });
  }

  #send(type, members) {
    this.#socket?.send(type, members);
  }

  #take(event) {
    RealtimeSession.#handlers[event.type]?.call(this, event);
  }

  #turnEnd(at) {
    const id = this.#turn;
    this.#turn = null;
    this.on.onTurnEnd(id, at);
  }

  #turnVoid() {
    if (this.#turn !== null) this.on.onTurnVoid(this.#turn);
    this.#turn = null;
  }

  static #handlers = {
    "session.created"() {
      this.#begun.resolve();
    },
    "session.updated"({ session }) {
      this.#silenceMs = session.audio.input.turn_detection?.silence_duration_ms ?? 0;
    },
    "input_audio_buffer.speech_started"({ item_id }) {
      this.#turn = item_id;
      this.on.onTurn(item_id);
      this.on.onChange();
    },
    // The user's last sample came before the silence that shows the turn's end.
    "input_audio_buffer.speech_stopped"({ audio_end_ms }) {
      const at = this.#clockMs + audio_end_ms - this.#silenceMs;
      const late = this.isCall ? this.#silenceMs : 0; // a call's sound is not sent from here
      if (this.#turn !== null) this.#turnEnd(Number.isFinite(at) ? at : performance.now() - late);
      this.on.onChange();
    },
    "input_audio_buffer.cleared"() {
      this.#turnVoid();
    },
    "input_audio_buffer.committed"({ item_id }) {
      if (this.#committedAt === null) return;
      this.on.onTurn(item_id);
      this.on.onTurnEnd(item_id, this.#committedAt);
      this.#committedAt = null;
    },
    "conversation.item.input_audio_transcription.delta"({ item_id, delta }) {
      this.on.onUserText(item_id, delta, false);
    },
    "conversation.item.input_audio_transcription.completed"({ item_id, transcript }) {
      this.on.onUserText(item_id, transcript, true);
    },
    "conversation.item.input_audio_transcription.failed"({ error }) {
      this.on.onError(new Error(`What you said was not written down: ${error.message}`));
    },
    "response.created"({ response }) {
      this.#responses.set(response.id, null);
      this.on.onChange();
    },
    "response.output_item.added"({ response_id, item }) {
      if (item.type !== "message") return;
      this.#responses.set(response_id, item.id);
      this.#spoken.set(response_id, item.id);
      this.on.onAnswer(item.id);
    },
    "response.output_text.delta"({ item_id, delta }) {
      this.on.onText(item_id, delta, true);
    },
    "response.output_audio_transcript.delta"({ item_id, delta }) {
      if (!this.#silenced.has(item_id)) this.on.onText(item_id, delta, false);
    },
    "response.output_audio.delta"({ item_id, delta }) {
      this.hasSpoken = true;
      if (!this.#silenced.has(item_id)) this.on.onSound(item_id, toFloats(fromBase64(delta)));
    },
    "output_audio_buffer.started"({ response_id }) {
      this.hasSpoken = true;
      const item = this.#spoken.get(response_id);
      this.#heard.set(response_id, { item, since: performance.now() });
      this.on.onStarted(item, performance.now());
    },
    "output_audio_buffer.stopped"({ response_id }) {
      const { item, since } = this.#heard.get(response_id);
      this.#heard.delete(response_id);
      this.on.onPlayed(item, Math.round(performance.now() - since));
    },
    "output_audio_buffer.cleared"({ response_id }) {
      this.#heard.delete(response_id);
      this.on.onChange();
    },
    "conversation.item.truncated"({ item_id, audio_end_ms }) {
      if (!this.isCall) return;
      this.#silenced.add(item_id);
      this.on.onCut(item_id, audio_end_ms);
      this.#send("conversation.item.retrieve", { item_id });
    },
    "response.output_audio.done"({ item_id }) {
      this.on.onSoundEnd(item_id);
    },
    "response.done"({ response }) {
      const item = this.#responses.get(response.id);
      this.#responses.delete(response.id);
      this.on.onAnswerEnd(item, response.status, response.status_details?.error?.message);
    },
    "conversation.item.retrieved"({ item }) {
      this.on.onHeard(item.id, item.content[0]?.transcript ?? "");
    },
    error({ error }) {
      if (!NO_HARM.has(error.code)) this.on.onError(new Error(error.message));
    },
  };
}
