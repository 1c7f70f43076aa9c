// Pictures, with previews and progress.

import { bytesOf, call, eventsOf, post } from "./api.js";
import { make } from "./dom.js";

const STREAMED = { stream: true, partial_images: 3, quartet: { progress: true } };

// Makes one, of a prompt or of a picture beside it, and shows it in `work`.
export async function makePicture(body, start, work) {
  const request = { ...body, ...STREAMED };
  const response = start ? await edit(request, start, work.signal) : await post("/v1/images/generations", request, { signal: work.signal });
  for await (const event of eventsOf(response)) take(event, body.prompt, work);
}

function edit(request, start, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(request)) {
    if (value !== undefined) form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  form.append("image", start);
  return call("/v1/images/edits", { method: "POST", body: form, signal });
}

function take(event, prompt, work) {
  if (event.type === "quartet.progress") {
    const { step, num_inference_steps: steps } = event;
    work.progress((100 * step) / steps, `step ${step} of ${steps}`);
    return;
  }
  const type = `image/${event.output_format}`, bytes = bytesOf(event.b64_json);
  const url = URL.createObjectURL(new Blob([bytes], { type }));
  const picture = make("img", { src: url, alt: prompt });
  if (!event.type.endsWith("completed")) picture.addEventListener("load", () => URL.revokeObjectURL(url));
  work.show(picture);
  if (event.type.endsWith("completed")) work.done(url, `picture.${event.output_format}`, `${event.size}, seed ${event.quartet.seed}`);
}
