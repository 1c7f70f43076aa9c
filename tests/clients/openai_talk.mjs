// A conversation by OpenAI's SDK for Node: node openai_talk.mjs BASE_URL DIRECTORY. See README.md.

import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';
import { Microphone, RATE_HZ } from './microphone.mjs';

const LAMP = {
  type: 'function',
  name: 'lamp',
  description: 'Turns the lamp on or off.',
  parameters: {
    type: 'object',
    properties: { on: { type: 'boolean' } },
    required: ['on'],
    additionalProperties: false,
  },
};
const [baseURL, directory] = process.argv.slice(2);
const report = { calls: [], interrupted: [], truncated_ms: [], errors: [] };
const realtime = new OpenAIRealtimeWS({ model: 'gpt-realtime' }, new OpenAI({ baseURL }));
let microphone;
let playing = null; // the item that is heard, since when, and how much of it there is

realtime.socket.on('open', () => {
  const session = { type: 'realtime', instructions: 'Be brief.', tools: [LAMP], tool_choice: 'required' };
  realtime.send({ type: 'session.update', session });
  microphone = new Microphone(directory, (piece) =>
    realtime.send({ type: 'input_audio_buffer.append', audio: piece.toString('base64') }),
  );
  microphone.say('first');
});

realtime.socket.on('close', (code) => {
  microphone?.close();
  if (report.interrupted.length < 3) report.errors.push(`the server has closed: ${code}`);
  console.log(JSON.stringify(report));
});

realtime.on('error', (error) => report.errors.push(error.message));

realtime.on('response.output_audio.delta', (event) => {
  if (playing === null) {
    playing = { item: event.item_id, since: performance.now(), bytes: 0 };
    if (report.interrupted.length === 0) microphone.say('second');
  }
  playing.bytes += Buffer.from(event.delta, 'base64').length;
});

realtime.on('input_audio_buffer.speech_started', () => {
  if (playing === null) return;
  const heard_ms = Math.min(performance.now() - playing.since, (playing.bytes * 1000) / (2 * RATE_HZ));
  const cut = { item_id: playing.item, content_index: 0, audio_end_ms: Math.floor(heard_ms) };
  realtime.send({ type: 'conversation.item.truncate', ...cut });
  playing = null;
});

realtime.on('conversation.item.truncated', (event) => report.truncated_ms.push(event.audio_end_ms));

realtime.on('response.done', ({ response }) => {
  const calls = response.output.filter((item) => item.type === 'function_call');
  for (const call of calls) {
    report.calls.push(JSON.parse(call.arguments));
    const item = { type: 'function_call_output', call_id: call.call_id, output: 'done' };
    realtime.send({ type: 'conversation.item.create', item });
  }
  if (calls.length) {
    realtime.send({ type: 'session.update', session: { type: 'realtime', tool_choice: 'none' } });
    realtime.send({ type: 'response.create' });
    return;
  }
  report.interrupted.push(response.status_details?.reason === 'turn_detected');
  if (report.interrupted.length === 2) {
    playing = null;
    microphone.say('third');
  }
  if (report.interrupted.length === 3) realtime.close();
});
