// Videos: jobs of the server, which are asked after until they have ended.

import { call, getJson, post } from "./api.js";
import { dataUrl } from "./attachments.js";
import { make } from "./dom.js";

const AGAIN_MS = 1000;

// Makes one, of a prompt or beginning with a picture, and shows it in `work`.
export async function makeVideo(body, start, work) {
  const reference = start ? { input_reference: { image_url: await dataUrl(start) } } : {};
  let video = await (await post("/v1/videos", { ...body, ...reference }, { signal: work.signal })).json();
  const path = `/v1/videos/${video.id}`;
  try {
    while (video.status === "queued" || video.status === "in_progress") {
      work.progress(video.status === "queued" ? null : video.progress, video.status === "queued" ? "waiting for its turn" : `${video.progress} %`);
      await pause(AGAIN_MS, work.signal);
      video = await getJson(path, { signal: work.signal });
    }
  } catch (error) {
    if (error.name === "AbortError") await call(path, { method: "DELETE" });
    throw error;
  }
  if (video.status !== "completed") throw new Error(video.error?.message ?? `The video ${video.status}.`);
  const url = URL.createObjectURL(await (await call(`${path}/content`)).blob());
  work.show(make("video", { src: url, controls: true, loop: true, playsInline: true }));
  work.done(url, `${video.id}.mp4`, `${video.size}, ${video.seconds} s, seed ${video.quartet.seed}`);
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    setTimeout(resolve, ms);
  });
}
