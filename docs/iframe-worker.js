/* Browsers start no worker from file:, so there the search runs in a frame that is not shown. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((done) => script.addEventListener("load", () => done(inner)));
      inner.document.head.append(script);
    }

    async postMessage(data) {
      const inner = await this.loaded;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
  };
}
