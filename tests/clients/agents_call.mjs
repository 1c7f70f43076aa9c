// A conversation by the OpenAI Agents SDK in a browser, over WebRTC: `call(url, apiKey, speech, most_ms)` resolves to
// its report, after `most_ms` to that of what there was.
// See README.md.

import { OpenAIRealtimeWebRTC, RealtimeAgent, RealtimeSession, tool } from './openai-realtime-agents.mjs';

const PARAMETERS = { type: 'object', properties: { on: { type: 'boolean' } }, required: ['on'], additionalProperties: false };
const QUIET = 0.003; // of a peak of 1

// A microphone that hears speech when it is told to, and silence else. files: {name: URL}.
async function microphone(context, files) {
  const out = context.createMediaStreamDestination();
  const hum = context.createConstantSource(); // without any source some browsers stop the track
  hum.offset.value = 0;
  hum.connect(out);
  hum.start();
  const sounds = {};
  for (const [name, url] of Object.entries(files))
    sounds[name] = await context.decodeAudioData(await (await fetch(url)).arrayBuffer());
  const say = (name) => {
    const source = context.createBufferSource();
    source.buffer = sounds[name];
    source.connect(out);
    source.start();
  };
  return { stream: out.stream, say };
}

// What is heard of a stream: a function that tells the milliseconds of sound since it was called before.
function ear(context, stream) {
  const analyser = context.createAnalyser();
  context.createMediaStreamSource(stream).connect(analyser);
  const samples = new Float32Array(analyser.fftSize);
  let [looks, loud, since] = [0, 0, performance.now()];
  setInterval(() => {
    analyser.getFloatTimeDomainData(samples);
    looks += 1;
    if (Math.max(...samples.map(Math.abs)) > QUIET) loud += 1;
  }, 20);
  return () => {
    const heard_ms = (loud / looks) * (performance.now() - since);
    [looks, loud, since] = [0, 0, performance.now()];
    return Math.round(heard_ms);
  };
}

export async function call(url, apiKey, speech, most_ms) {
  const report = { events: [], calls: [], done: [], buffer: [], truncated_ms: [], heard_ms: [], errors: [] };
  const context = new AudioContext();
  const { stream, say } = await microphone(context, speech);
  const audioElement = document.body.appendChild(document.createElement('audio'));
  const transport = new OpenAIRealtimeWebRTC({ mediaStream: stream, audioElement, baseUrl: url });
  const lamp = tool({
    name: 'lamp',
    description: 'Turns the lamp on or off.',
    parameters: PARAMETERS,
    strict: false,
    execute: async (given) => {
      report.calls.push(given);
      return 'done';
    },
  });
  const agent = new RealtimeAgent({ name: 'housekeeper', instructions: 'Be brief.', tools: [lamp] });
  const config = { audio: { input: { transcription: null, turnDetection: { type: 'server_vad' } } } };
  const session = new RealtimeSession(agent, { transport, config });
  let [listen, ended] = [() => 0, () => {}];
  const end = new Promise((resolve) => (ended = resolve));
  // Not before the response to the tool's result: should that come late, it would begin while the user speaks.
  let [spoke, answered] = [() => {}, () => {}];
  const halfSecond = new Promise((resolve) => (spoke = () => setTimeout(resolve, 500)));
  Promise.all([halfSecond, new Promise((resolve) => (answered = resolve))]).then(() => say('second'));
  audioElement.addEventListener('playing', () => (listen = ear(context, audioElement.srcObject)), { once: true });
  session.on('error', ({ error }) => report.errors.push(JSON.stringify(error)));
  session.on('transport_event', (event) => {
    if (!event.type.endsWith('.delta')) report.events.push(`${Math.round(performance.now())} ${event.type}`);
    if (event.type === 'conversation.item.truncated') report.truncated_ms.push(event.audio_end_ms);
    if (event.type === 'response.done') {
      report.done.push(event.response.status_details?.reason ?? event.response.status);
      if (report.done.length === 2) answered();
    }
    if (!event.type.startsWith('output_audio_buffer.')) return;
    const what = event.type.split('.')[1];
    report.buffer.push(what);
    const answers = report.buffer.filter((each) => each === 'started').length;
    if (what === 'started') listen();
    if (what === 'started' && answers === 1) spoke();
    if (what !== 'started') report.heard_ms.push(listen());
    if (what === 'stopped' && answers === 2) say('third');
    if (what === 'stopped' && answers === 3) ended();
  });
  session.transport.on('connection_change', (status) => {
    if (status === 'disconnected') ended();
  });
  setTimeout(() => {
    report.errors.push(`no end after ${most_ms} ms`);
    ended();
  }, most_ms);
  await session.connect({ apiKey });
  report.callId = transport.callId;
  say('first');
  await end;
  for (const each of (await transport.connectionState.peerConnection.getStats()).values())
    if (each.type === 'inbound-rtp')
      report.received = { packets: each.packetsReceived, lost: each.packetsLost, concealed: each.concealedSamples };
  session.close();
  await context.close();
  return report;
}
