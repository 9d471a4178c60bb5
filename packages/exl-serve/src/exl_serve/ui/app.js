// The chat page: plain DOM, no framework. What a model writes only ever becomes text nodes.
const $ = (id) => document.getElementById(id);
const STORE = "exl-chat";
const LONGEST = 1536; // pixels of an image's longer side: larger ones soon fill requests and the history
const POLL = 1000; // milliseconds between two looks at models that are being loaded
const SAVE = 2000; // milliseconds after which the part of an answer that has come is saved
const KEPT = 4; // conversations that the browser keeps, so that each open tab has its own
const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let messages = [];
let own = {}; // the id of this tab's conversation, and `root`, which copies of one conversation share
let attached = []; // data: URLs of the next message's images
let reading = Promise.resolve(); // ends when all images that were given are attached
let coming = false; // whether a listed model may soon be ready
let seeing = new Set(); // models that take images
let ready = new Set(); // models that are loaded
let listed = ""; // the list of models as shown
let looking = 0; // the timer of the next look at it
let running = null;

function stored() {
  try { return Object(JSON.parse(localStorage.getItem(STORE) || "{}")); } catch { return {}; }
}

function chatsOf(saved) {
  if (Array.isArray(saved.chats)) return saved.chats.filter((chat) => Array.isArray(chat?.messages));
  // Earlier versions kept one conversation.
  return Array.isArray(saved.messages) ? [{ id: "first", root: "first", messages: saved.messages }] : [];
}

function freshId() {
  return Date.now().toString(36) + Math.random().toString(36).slice(2); // randomUUID needs HTTPS
}

// A reload shows the tab's conversation again. A new tab begins with a copy of the newest one, which another tab may
// still change.
function load() {
  const saved = stored();
  const chats = chatsOf(saved);
  const mine = chats.find((chat) => chat.id === sessionStorage.getItem(STORE));
  const shown = mine || chats.at(-1);
  const id = mine ? mine.id : freshId();
  own = { id, root: shown?.root || id };
  messages = shown?.messages || [];
  if (messages.at(-1)?.cut && isEmpty(messages.at(-1))) messages.pop(); // the page was left before its first token
  for (const name of SETTINGS) if (saved[name] !== undefined) $(name).value = saved[name];
  $("key").value = sessionStorage.getItem("exl-key") || "";
}

function isEmpty(message) {
  return !message.content && !message.reasoning && !message.calls;
}

function bare(chats) {
  return chats.map((chat) => ({ ...chat, messages: chat.messages.map(({ images, ...rest }) => rest) }));
}

// Write this tab's conversation, and leave those of other tabs as they are, unless there is no room.
function save() {
  const { messages: old, ...saved } = stored();
  const others = chatsOf({ messages: old, ...saved }).filter((chat) => chat.id !== own.id).slice(1 - KEPT);
  const mine = [{ ...own, messages }];
  // Images fill it first.
  for (const chats of [[...others, ...mine], [...bare(others), ...mine], [...bare(others), ...bare(mine)], bare(mine)]) {
    try {
      localStorage.setItem(STORE, JSON.stringify({ ...saved, chats }));
      sessionStorage.setItem(STORE, own.id);
      return;
    } catch { /* full or forbidden */ }
  }
}

function saveSettings() {
  const saved = stored();
  for (const name of SETTINGS) saved[name] = $(name).value;
  try { localStorage.setItem(STORE, JSON.stringify(saved)); } catch { /* the chat goes on */ }
}

// Forget the conversation and its copies. The tab of a copy writes that again when it changes.
function clear() {
  const saved = stored();
  saved.chats = chatsOf(saved).filter((chat) => chat.id !== own.id && chat.root !== own.root);
  delete saved.messages;
  try { localStorage.setItem(STORE, JSON.stringify(saved)); } catch { /* forbidden */ }
  const id = freshId();
  own = { id, root: id };
  messages = [];
  save();
}

function headers() {
  const found = { "content-type": "application/json" };
  const key = $("key").value.trim();
  if (key) found.authorization = `Bearer ${key}`;
  return found;
}

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

async function explain(response) {
  try {
    const told = await response.json();
    return `${told.error.message} (${response.status} ${told.error.code})`;
  } catch { return `The server answered ${response.status}.`; }
}

// A quiet look neither shows errors nor takes one away.
async function listModels(quiet = false) {
  clearTimeout(looking);
  let response;
  try { response = await fetch("/v1/models", { headers: headers() }); }
  catch {
    if (!quiet) fail("The server does not answer. Is it running?");
    else if (coming) looking = setTimeout(listModels, POLL, true);
    return;
  }
  if (quiet && !response.ok) {
    // A 401 ends the looks: each would count as a wrong key.
    if (response.status !== 401 && coming) looking = setTimeout(listModels, POLL, true);
    return;
  }
  if (response.status === 401) {
    $("panel").hidden = false;
    $("panel-toggle").setAttribute("aria-expanded", "true");
    $("key").focus();
    fail("This server needs an API key: enter it in the settings.");
    return;
  }
  if (!response.ok) { fail(await explain(response)); return; }
  const { data } = await response.json();
  if (!quiet) fail("");
  coming = data.some((model) => ["loading", "draining", "stalled"].includes(model.exl?.state));
  if (coming) looking = setTimeout(listModels, POLL, true);
  const text = JSON.stringify(data);
  if (text === listed) return; // a new list would close an open one
  listed = text;
  showModels(data);
  showAttached();
}

function showModels(models) {
  const chosen = $("model").value;
  $("model").replaceChildren();
  seeing = new Set();
  ready = new Set();
  for (const model of models) {
    if (model.exl?.modalities?.includes("image")) seeing.add(model.id);
    if (model.exl?.state === "ready") ready.add(model.id);
    const option = document.createElement("option");
    option.value = model.id;
    const state = model.exl && model.exl.state !== "ready" ? ` (${model.exl.state})` : "";
    option.textContent = model.id + state;
    $("model").append(option);
  }
  if (models.some((model) => model.id === chosen)) $("model").value = chosen;
}

// ---- images ---------------------------------------------------------------------------------------------------------

function picture(url, text) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = text;
  return image;
}

function imagesOf(message) {
  const given = Array.isArray(message.images) ? message.images : [];
  return given.filter((url) => typeof url === "string" && url.startsWith("data:image/"));
}

function showAttached() {
  $("attach").hidden = !seeing.has($("model").value);
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...attached.map((url, at) => {
    const li = document.createElement("li");
    li.append(picture(url, `Image ${at + 1}`), button("Remove", () => {
      attached.splice(at, 1);
      showAttached();
    }));
    return li;
  }));
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

// The data: URL of an image, scaled down if it is large and that makes it shorter. JPEG and WebP stay what they are;
// others become PNG.
async function imageUrl(file) {
  const url = await dataUrl(file);
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { return url; } // the server may read what a browser cannot
  const scale = LONGEST / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1) { bitmap.close(); return url; }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const type = ["image/jpeg", "image/webp"].includes(file.type) ? file.type : "image/png";
  const scaled = canvas.toDataURL(type, 0.9);
  return scaled.startsWith("data:image/") && scaled.length < url.length ? scaled : url;
}

function attach(files) {
  reading = reading.then(() => read(files));
}

async function read(files) {
  if (!seeing.has($("model").value)) { fail(`The model ${$("model").value} takes no images.`); return; }
  fail("");
  for (const file of files) {
    try {
      const url = await imageUrl(file);
      attached.push(url); // not before: a message that is sent meanwhile replaces the list
    } catch { fail(`The file ${file.name} cannot be read.`); }
  }
  showAttached();
}

function imageFiles(transfer) {
  return [...(transfer?.files || [])].filter((file) => file.type.startsWith("image/"));
}

// ---- Markdown: paragraphs, headings, lists, code, bold, italics -----------------------------------------------------

function inline(parent, text) {
  const pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    parent.append(text.slice(at, match.index));
    const element = document.createElement(match[1] ? "code" : match[2] ? "strong" : "em");
    element.textContent = match[1] || match[2] || match[3];
    parent.append(element);
    at = match.index + match[0].length;
  }
  parent.append(text.slice(at));
}

function block(name, text) {
  const element = document.createElement(name);
  inline(element, text);
  return element;
}

function markdown(text) {
  const found = document.createDocumentFragment();
  const parts = text.split(/^```[^\n]*\n?/m);
  parts.forEach((part, at) => {
    if (at % 2) {
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = part.replace(/\n$/, "");
      pre.append(code);
      found.append(pre);
      return;
    }
    for (const paragraph of part.split(/\n{2,}/)) {
      if (!paragraph.trim()) continue;
      const lines = paragraph.replace(/^\n+|\n+$/g, "").split("\n");
      const bullets = lines.every((line) => /^\s*[-*] /.test(line));
      const numbers = lines.every((line) => /^\s*\d+[.)] /.test(line));
      if (bullets || numbers) {
        const list = document.createElement(bullets ? "ul" : "ol");
        for (const line of lines) list.append(block("li", line.replace(/^\s*([-*]|\d+[.)]) /, "")));
        found.append(list);
      } else if (lines.length === 1 && /^#{1,6} /.test(lines[0])) {
        found.append(block("h4", lines[0].replace(/^#+ /, "")));
      } else {
        found.append(block("p", lines.join("\n")));
      }
    }
  });
  return found;
}

// ---- the conversation -----------------------------------------------------------------------------------------------

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

// Whether a model can go on with an answer: with a text, not with half a call or half its reasoning.
function continues(message) {
  return Boolean(message.cut && message.content && !message.calls);
}

function item(message, index) {
  const li = document.createElement("li");
  li.className = message.role;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = message.role === "user" ? "You" : message.model || "Model";
  li.append(who);
  fill(li, message);
  const actions = document.createElement("div");
  actions.className = "actions";
  actions.append(button("Copy", () => navigator.clipboard.writeText(message.content)));
  const last = index === messages.length - 1;
  if (message.role === "user") {
    actions.append(button("Edit", () => edit(index)));
    if (last) actions.append(button("Send again", resend));
  } else if (last) {
    if (continues(message)) actions.append(button("Continue", resume));
    actions.append(button("Regenerate", regenerate));
  }
  if (!running) li.append(actions);
  return li;
}

function fill(li, message) {
  for (const old of li.querySelectorAll(".body, .images, details, .facts, .call")) old.remove();
  const after = li.querySelector(".actions");
  const add = (element) => li.insertBefore(element, after);
  if (message.reasoning) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    details.append(summary, message.reasoning);
    add(details);
  }
  const images = imagesOf(message);
  if (images.length) {
    const row = document.createElement("div");
    row.className = "images";
    row.append(...images.map((url, at) => picture(url, `Image ${at + 1}`)));
    add(row);
  }
  const body = document.createElement("div");
  body.className = "body";
  if (message.role === "user") body.textContent = message.content;
  else body.append(markdown(message.content));
  add(body);
  for (const call of message.calls || []) {
    const pre = document.createElement("pre");
    pre.className = "call";
    pre.textContent = `${call.name}(${call.arguments})`;
    add(pre);
  }
  if (message.facts) {
    const facts = document.createElement("div");
    facts.className = "facts";
    facts.textContent = message.facts;
    add(facts);
  }
}

function render() {
  const list = $("messages");
  list.replaceChildren(...messages.map(item));
  list.scrollTop = list.scrollHeight;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
}

function edit(index) {
  if (running) return;
  $("input").value = messages[index].content;
  attached = imagesOf(messages[index]);
  showAttached();
  messages = messages.slice(0, index);
  save();
  render();
  $("input").focus();
}

function regenerate() {
  if (running) return;
  messages.pop();
  answer();
}

function resend() {
  if (!running) answer();
}

function resume() {
  if (!running) answer(messages.at(-1));
}

function contentOf(message) {
  // A model that takes no images goes on with the text of a chat that has some.
  const images = seeing.has($("model").value) ? imagesOf(message) : [];
  if (!images.length) return message.content;
  return [
    ...images.map((url) => ({ type: "image_url", image_url: { url } })),
    { type: "text", text: message.content },
  ];
}

function request() {
  const sent = messages.map((message) => ({ role: message.role, content: contentOf(message) }));
  const system = $("system").value.trim();
  if (system) sent.unshift({ role: "system", content: system });
  const body = { model: $("model").value, messages: sent, stream: true, stream_options: { include_usage: true } };
  for (const name of SETTINGS.slice(1)) if ($(name).value !== "") body[name] = Number($(name).value);
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

function take(message, chunk, times) {
  if (chunk.error) throw new Error(`${chunk.error.message} (${chunk.error.code})`);
  if (chunk.usage) {
    const seconds = (performance.now() - times.first) / 1000;
    const rate = chunk.usage.completion_tokens / Math.max(seconds, 0.001);
    const cached = chunk.usage.prompt_tokens_details?.cached_tokens || 0;
    message.facts =
      `${chunk.usage.prompt_tokens} prompt tokens (${cached} cached), ${chunk.usage.completion_tokens} new, ` +
      `first after ${Math.round(times.first - times.began)} ms, ${rate.toFixed(1)} tokens/s`;
  }
  const choice = chunk.choices[0];
  if (!choice) return;
  times.first ||= performance.now();
  const delta = choice.delta;
  message.content += delta.content || "";
  message.reasoning = (message.reasoning || "") + (delta.reasoning_content || "");
  for (const call of delta.tool_calls || []) {
    message.calls ||= [];
    message.calls[call.index] ||= { name: "", arguments: "" };
    message.calls[call.index].name += call.function.name || "";
    message.calls[call.index].arguments += call.function.arguments || "";
  }
}

// Ask for an answer, or for the rest of one that was cut off: `message` is the last message then. An answer counts as
// cut off until its end has come.
async function answer(message) {
  fail("");
  const body = request();
  const model = body.model;
  if (message) {
    body.continue_final_message = true;
    const before = message.model || model;
    if (!before.split(", ").includes(model)) message.model = `${before}, ${model}`; // both wrote it
  } else {
    message = { role: "assistant", content: "", model };
    messages.push(message);
  }
  message.cut = true;
  running = new AbortController();
  save();
  render();
  const li = $("messages").lastElementChild;
  const times = { began: performance.now(), first: 0 };
  let due = false;
  let saved = performance.now();
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error(await explain(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") { delete message.cut; break; }
      take(message, JSON.parse(data), times);
      if (performance.now() - saved > SAVE) { saved = performance.now(); save(); }
      if (due) continue;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        const list = $("messages");
        const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
        fill(li, message);
        if (follows) list.scrollTop = list.scrollHeight;
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      const lost = error instanceof TypeError;
      const way = continues(message) ? "Continue" : isEmpty(message) ? "Send again" : "Regenerate";
      fail(lost ? `The connection to the server was lost. Press ${way} to try again.` : error.message);
    }
  } finally {
    running = null;
    if (messages.at(-1) === message && isEmpty(message)) messages.pop();
    save();
    render();
    $("input").focus();
    if (!ready.has(model)) listModels(true); // the request may have loaded it
  }
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  await reading;
  const text = $("input").value.trim();
  if ((!text && !attached.length) || running) return;
  const model = $("model").value;
  if (attached.length && !seeing.has(model)) { fail(`The model ${model} takes no images.`); return; }
  $("input").value = "";
  if (messages.at(-1)?.role === "user") messages.pop(); // it was never answered
  messages.push(attached.length ? { role: "user", content: text, images: attached } : { role: "user", content: text });
  attached = [];
  showAttached();
  answer();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("input").addEventListener("paste", (event) => {
  const files = imageFiles(event.clipboardData);
  // Programs that copy a text with its picture mean the text.
  if (!files.length || event.clipboardData.getData("text/plain")) return;
  event.preventDefault();
  attach(files);
});
const hasFiles = (event) => event.dataTransfer.types.includes("Files");
document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // or the browser would leave the page for the file
  const files = imageFiles(event.dataTransfer);
  if (files.length) attach(files);
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  const files = [...$("files").files];
  $("files").value = ""; // or the same file could not be chosen again
  attach(files);
});
$("model").addEventListener("change", showAttached);
window.addEventListener("pagehide", () => { if (running) save(); }); // a reload ends the answer
document.addEventListener("visibilitychange", () => { if (!document.hidden) listModels(true); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  clear();
  attached = [];
  showAttached();
  fail("");
  render();
});
$("panel-toggle").addEventListener("click", () => {
  $("panel").hidden = !$("panel").hidden;
  $("panel-toggle").setAttribute("aria-expanded", String(!$("panel").hidden));
});
$("export").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(messages, null, 2)], { type: "application/json" }));
  link.download = "chat.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
$("key").addEventListener("change", () => {
  sessionStorage.setItem("exl-key", $("key").value.trim());
  listModels();
});
for (const name of SETTINGS) $(name).addEventListener("change", saveSettings);

load();
render();
listModels();
