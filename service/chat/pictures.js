// Images of a message: read from files, made small enough to send and to keep, and drawn on a canvas (the page's policy allows
// no image of another source than the server's).

import { el } from "/web/show.js";

export const MAX_IMAGES = 4; // of one message
const MAX_SIDE = 1280, MAX_CHARS = 500_000, QUALITIES = [0.9, 0.75, 0.5];
const SHOWN_PIXELS = 320; // the longer side of a small picture
const DATA_URL = /^data:(image\/(?:png|jpeg));base64,([A-Za-z0-9+/]+=*)$/;

/** Of a canvas with these sizes; transparent places are white, as JPEG has none. */
function drawn(image, width, height) {
  const canvas = el("canvas");
  Object.assign(canvas, { width, height });
  const on = canvas.getContext("2d");
  on.fillStyle = "#fff";
  on.fillRect(0, 0, width, height);
  on.drawImage(image, 0, 0, width, height);
  return canvas;
}

function fitted(image, side) {
  const scale = Math.min(1, side / Math.max(image.width, image.height));
  return drawn(image, Math.max(1, Math.round(image.width * scale)), Math.max(1, Math.round(image.height * scale)));
}

/** {name, url} of a file: a data URL of a PNG, or of a JPEG where that would be long. Throws where the browser cannot read it. */
export async function readImage(file) {
  const image = await createImageBitmap(file);
  for (let side = MAX_SIDE; ; side /= 2) {
    const canvas = fitted(image, side);
    const urls = [() => canvas.toDataURL("image/png"), ...QUALITIES.map((quality) => () => canvas.toDataURL("image/jpeg", quality))];
    for (const make of file.type === "image/jpeg" ? urls.slice(1) : urls) {
      const url = make();
      if (url.length <= MAX_CHARS) return { name: file.name || "image", url };
    }
  }
}

/** What a model reads of a question. */
export function contentOf(question, images) {
  if (!images.length) return question;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return question === "" ? parts : [...parts, { type: "text", text: question }];
}

/** Whether a model of /v1/models takes images. */
export const takesPictures = (model) => model?.has_image_understanding === true;

/** The picture of {name, url}, drawn when it has been read. */
export function picture({ name, url }) {
  const canvas = el("canvas", "picture");
  Object.assign(canvas, { width: 0, height: 0, role: "img", ariaLabel: name, title: name });
  show(canvas, url);
  return canvas;
}

async function show(canvas, url) {
  const [, type, data] = DATA_URL.exec(url) ?? [];
  if (!data) return;
  try {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    const small = fitted(await createImageBitmap(new Blob([bytes], { type })), SHOWN_PIXELS);
    Object.assign(canvas, { width: small.width, height: small.height });
    canvas.getContext("2d").drawImage(small, 0, 0);
  } catch {
    canvas.replaceWith(el("span", "note", `${canvas.ariaLabel} cannot be shown`));
  }
  canvas.dispatchEvent(new Event("grown", { bubbles: true }));
}

/** Images that the next message will carry. Owns their box; `onChange()`: after each change, `onError(text)`: what was refused. */
export class Attachments {
  constructor(box, { onChange, onError }) {
    Object.assign(this, { box, onChange, onError, list: [], reading: Promise.resolve() });
  }

  /** Files that were chosen, pasted or dropped. `taken`: whether the model takes images. */
  async offer(files, taken) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    if (!taken) this.onError("This model does not take images.");
    else if (!images.length) this.onError("Only images can be attached.");
    else await this.add(images);
  }

  /** One after the other: reading takes time, and two at once would each begin with the list of before. */
  add(files) {
    return (this.reading = this.reading.then(() => this.read(files)));
  }

  async read(files) {
    for (const file of files) {
      if (this.list.length >= MAX_IMAGES) return this.onError(`A message takes at most ${MAX_IMAGES} images.`);
      try {
        this.set([...this.list, await readImage(file)]);
      } catch {
        this.onError(`This browser cannot read ${file.name || "that"} as an image.`);
      }
    }
  }

  set(images) {
    this.list = images;
    this.box.hidden = !images.length;
    this.box.replaceChildren(...images.map((image) => this.draw(image)));
    this.onChange();
  }

  draw(image) {
    const remove = el("button", "remove", "×");
    Object.assign(remove, { type: "button", ariaLabel: `Remove ${image.name}`, title: "Remove" });
    remove.addEventListener("click", () => this.set(this.list.filter((each) => each !== image)));
    return el("li", "", picture(image), remove);
  }

  take() {
    const { list } = this;
    this.set([]);
    return list;
  }
}
