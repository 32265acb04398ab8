// SPDX-License-Identifier: Apache-2.0
// Browsers start no worker from a file: there the search runs in a hidden frame, which this makes look like one.
(function () {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const answer = (data) => {
        const event = new MessageEvent("message", { data: data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      this.ready = new Promise((resolve, reject) => {
        inside.postMessage = answer;
        // Scripts of a frame come one after the other, and what was asked for goes on when the last has come.
        inside.importScripts = (...names) =>
          names.reduce((before, name) => before.then(() => FrameWorker.load(inside, new URL(name, url))), Promise.resolve());
        FrameWorker.load(inside, url).then(resolve, reject);
      });
    }

    static load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url.toString();
        script.onload = resolve;
        script.onerror = reject;
        inside.document.documentElement.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.Worker = FrameWorker;
})();
