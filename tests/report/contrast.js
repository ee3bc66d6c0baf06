() => {
  const canvas = new OffscreenCanvas(1, 1),
    context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const over = (top, under) => top.slice(0, 3).map((v, n) => (v * top[3] + under[n] * (255 - top[3])) / 255);
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    return over(rgba(getComputedStyle(node).backgroundColor), ground(node.parentElement));
  };
  const behind = (text) => {
    const box = text.getBoundingClientRect(),
      [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    let color = ground(text.ownerSVGElement);
    for (const rect of text.ownerSVGElement.querySelectorAll("rect")) {
      const area = rect.getBoundingClientRect();
      const before = rect.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
      if (before && area.x <= x && x <= area.right && area.y <= y && y <= area.bottom)
        color = over(rgba(getComputedStyle(rect).fill), color);
    }
    return color;
  };
  const poor = [];
  let seen = 0;
  for (const node of document.querySelectorAll("body *")) {
    const words = [...node.childNodes].filter((child) => child.nodeType === 3 && child.textContent.trim());
    if (
      !words.length ||
      !node.checkVisibility({ visibilityProperty: true }) ||
      node.closest("script, option, .unseen, .skip")
    )
      continue;
    const style = getComputedStyle(node),
      drawn = node.ownerSVGElement;
    const back = drawn ? behind(node) : ground(node),
      front = over(rgba(drawn ? style.fill : style.color), back);
    const [a, b] = [light(front), light(back)],
      ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize),
      large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen += 1;
    if (ratio < (large ? 3 : 4.5))
      poor.push(`${node.tagName} "${words[0].textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return { poor, seen };
};
