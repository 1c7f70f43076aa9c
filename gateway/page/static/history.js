// What was said, as new sessions and chat completions are told of it.

export class History {
  #entries = [];

  // An entry: {role, text, images, media, itemId}. `images` are data URLs, `media` content parts of chats.
  add(entry) {
    const added = { text: "", images: [], media: [], ...entry };
    this.#entries.push(added);
    return added;
  }

  find(itemId) {
    return this.#entries.find((entry) => entry.itemId === itemId);
  }

  clear() {
    this.#entries = [];
  }

  // Whether there is something in it that realtime sessions have no items for.
  get hasMedia() {
    return this.#entries.some((entry) => entry.media.length > 0);
  }

  // Items for a new realtime session. Of films and sounds it is told the names only, of speech what was written down.
  items() {
    return this.#told().map((entry) => itemOf(entry));
  }

  // Messages of a chat.
  messages(instructions) {
    const system = instructions ? [{ role: "system", content: instructions }] : [];
    return [...system, ...this.#told().map((entry) => (entry.role === "user" ? asked(entry) : { role: "assistant", content: entry.text }))];
  }

  #told() {
    return this.#entries.filter((entry) => entry.text || entry.images.length || entry.media.length);
  }
}

// The item of a realtime session that says what `entry` does.
export function itemOf(entry) {
  if (entry.role === "assistant") return { type: "message", role: "assistant", content: [{ type: "output_text", text: entry.text }] };
  const names = entry.media.map(({ name }) => `[${name}]`).join(" ");
  const text = [names, entry.text].filter(Boolean).join("\n");
  const content = entry.images.map((image_url) => ({ type: "input_image", image_url }));
  if (text) content.push({ type: "input_text", text });
  return { type: "message", role: "user", content };
}

function asked(entry) {
  const content = entry.images.map((url) => ({ type: "image_url", image_url: { url } }));
  content.push(...entry.media.map(({ part }) => part));
  if (entry.text) content.push({ type: "text", text: entry.text });
  return { role: "user", content };
}
