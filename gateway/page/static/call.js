// A session by WebRTC: /v1/realtime/calls. Sound goes both ways by the connection, events by its channel.

import { Problem, call } from "./api.js";

const WITHIN_MS = 5000; // else the WebSocket is taken: a network may let no UDP through
const LEVEL_MS = 50;
let isPossible = "RTCPeerConnection" in window; // until a call does not begin

// As `openSocket`, or null where a call does not begin. `onLevel` gets the loudness of what is heard.
export async function openCall(onEvent, onClose, onLevel) {
  if (!isPossible) return null;
  const connection = new RTCPeerConnection();
  try {
    const sender = connection.addTransceiver("audio").sender, channel = connection.createDataChannel("oai-events");
    const opened = new Promise((resolve) => (channel.onopen = resolve));
    const waiting = []; // events that come before the session's owner can take them
    channel.onmessage = ({ data }) => waiting.push(JSON.parse(data));
    const speaker = new Speaker(connection, onLevel);
    await connection.setLocalDescription(await connection.createOffer());
    const headers = { "content-type": "application/sdp" };
    const answer = await call("/v1/realtime/calls", { method: "POST", headers, body: connection.localDescription.sdp });
    await connection.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    if (!(await within(opened))) throw new Problem("The call was not connected.");
    return new Call(connection, channel, sender, speaker, { onEvent, onClose, waiting });
  } catch (error) {
    connection.close();
    if (error.name === "AbortError") throw error;
    isPossible = false;
    return null;
  }
}

class Call {
  isCall = true;
  #wanted = false;

  constructor(connection, channel, sender, speaker, { onEvent, onClose, waiting }) {
    Object.assign(this, { connection, channel, sender, speaker });
    const ended = () => {
      this.#end();
      onClose(this.#wanted ? null : "The connection was lost. What was said is kept: go on when you like.");
    };
    channel.onclose = ended;
    channel.onmessage = ({ data }) => onEvent(JSON.parse(data));
    addEventListener("pagehide", () => this.close(), { once: true }); // else the server hears of it after 30 s
    queueMicrotask(() => waiting.forEach(onEvent));
  }

  send(type, members = {}) {
    this.channel.send(JSON.stringify({ type, ...members }));
  }

  // The microphone's track, or null: silence.
  speak(track) {
    return this.sender.replaceTrack(track);
  }

  close() {
    this.#wanted = true;
    this.#end();
  }

  #end() {
    this.speaker.close();
    this.connection.close();
  }
}

// Plays what comes.
class Speaker {
  #element = new Audio();
  #context = null;
  #timer = null;

  constructor(connection, onLevel) {
    this.#element.autoplay = true;
    connection.ontrack = ({ streams, track }) => {
      const stream = streams[0] ?? new MediaStream([track]);
      this.#element.srcObject = stream;
      this.#measure(stream, onLevel);
    };
  }

  #measure(stream, onLevel) {
    this.#context = new AudioContext();
    const analyser = this.#context.createAnalyser(), samples = new Float32Array(analyser.fftSize);
    this.#context.createMediaStreamSource(stream).connect(analyser);
    this.#timer = setInterval(() => {
      analyser.getFloatTimeDomainData(samples);
      onLevel(Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length));
    }, LEVEL_MS);
  }

  close() {
    clearInterval(this.#timer);
    this.#element.srcObject = null;
    this.#context?.close();
  }
}

const within = (promise) => Promise.race([promise.then(() => true), new Promise((resolve) => setTimeout(resolve, WITHIN_MS, false))]);
