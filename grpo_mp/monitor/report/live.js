// Keeps the page of a run that goes on up to date: what has changed takes its new form in its place, so filters, open
// parts, focus, selection and every scroll stay as they are.
"use strict";
(() => {
  const EVERY_MS = 3000;
  const KEPT = ["open", "checked"];  // attributes that are the reader's
  let tag = "";

  const key = (node) => `${node.nodeName} ${node.id || (node.dataset && node.dataset.key) || ""}`;

  const update = (old, now) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
      return;
    }
    if (old.nodeName === "NOSCRIPT") return;  // a parser without scripts reads elements where the page has text
    for (const { name } of [...old.attributes])
      if (!now.hasAttribute(name) && !KEPT.includes(name)) old.removeAttribute(name);
    for (const { name, value } of now.attributes)
      if (old.getAttribute(name) !== value && !KEPT.includes(name)) old.setAttribute(name, value);
    if (old.nodeName === "svg" || old.nodeName === "SCRIPT") {  // a drawing is made anew as a whole
      if (!old.isEqualNode(now)) old.replaceChildren(...now.childNodes);
      return;
    }
    const left = [...old.childNodes];
    let place = old.firstChild;
    for (const child of [...now.childNodes]) {
      const found = left.findIndex((one) => key(one) === key(child));
      const [kept] = found < 0 ? [document.importNode(child, true)] : left.splice(found, 1);
      if (found >= 0) update(kept, child);
      while (place && place !== kept && left.includes(place) && !wanted(place, now)) {  // nobody wants it
        const next = place.nextSibling;
        left.splice(left.indexOf(place), 1);
        place.remove();
        place = next;
      }
      if (kept === place) place = place.nextSibling;
      else old.insertBefore(kept, place);
    }
    left.forEach((one) => one.remove());
  };

  const wanted = (node, now) =>
    node.nodeType === Node.ELEMENT_NODE && [...now.childNodes].some((one) => key(one) === key(node));

  const alert = (text) => {
    let shown = document.getElementById("live-problem");
    if (!shown) {
      shown = document.createElement("p");
      shown.id = "live-problem";
      shown.setAttribute("role", "alert");
      document.body.prepend(shown);
    }
    if (shown.textContent !== text) shown.textContent = text;
  };

  let looks = false;
  const look = async () => {
    if (looks) return;  // a page of megabytes may take longer than this waits
    looks = true;
    try {
      const reply = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (reply.status === 304) return;
      if (!reply.ok) throw new Error(`${reply.status}`);
      const focused = document.activeElement, now = new DOMParser().parseFromString(await reply.text(), "text/html");
      const scrolled = [...document.querySelectorAll(".scroll, pre")].filter((one) => one.scrollTop || one.scrollLeft)
        .map((one) => [one, one.scrollTop, one.scrollLeft]);
      update(document.head, now.head);
      update(document.body, now.body);
      for (const [one, top, before] of scrolled) one.scrollTo({ top, left: before, behavior: "instant" });
      if (focused.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
      tag = reply.headers.get("ETag");
    } catch (error) {
      tag = "";  // the next answer is a whole page, without this text
      alert("The server does not answer: this page is of the last step that it sent.");
    } finally {
      looks = false;
    }
  };

  setInterval(look, EVERY_MS);
})();
