// HTTP calls of this server's API: with the key, and with errors in the server's own words.

import { askForKey, storedKey } from "./key.js";

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// A response whose status says that all is well. Asks for a key where one is missing or wrong.
export async function call(path, options = {}) {
  for (;;) {
    const key = storedKey(), headers = new Headers(options.headers);
    if (key) headers.set("authorization", `Bearer ${key}`);
    const response = await reached(path, { ...options, headers });
    if (response.ok) return response;
    const message = await messageOf(response);
    if (response.status !== 401) throw new Problem(message, response.status);
    await askForKey(`The server says: ${message}.`, key);
  }
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. See whether it still runs, and try again.");
  }
}

async function messageOf(response) {
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error?.message ?? text;
  } catch {
    message = text.slice(0, 300); // of a proxy
  }
  const wait = response.headers.get("retry-after");
  return (message || `HTTP ${response.status}`) + (wait ? ` (again in ${wait} s)` : "");
}

export const getJson = async (path, options) => (await call(path, options)).json();

export function post(path, body, options = {}) {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
}

// What the API has in base64.
export function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

// The server-sent events of a response, parsed. An error among them is thrown.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (!data || data === "[DONE]") continue;
        const event = JSON.parse(data);
        if (event.error) throw new Problem(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
