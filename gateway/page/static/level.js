// A bar that shows how loud something is.

const LEAST_DB = -60;

// Shows a root mean square of 0 to 1.
export function showLevel(bar, rms) {
  const db = 20 * Math.log10(Math.max(rms, 1e-6));
  const level = Math.max(0, Math.min(1, 1 - db / LEAST_DB));
  bar.style.setProperty("--level", level.toFixed(3));
  bar.setAttribute("aria-valuenow", String(Math.round(level * 100)));
}
