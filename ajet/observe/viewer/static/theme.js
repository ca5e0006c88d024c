// Runs before the page is drawn, so that a dark page never flashes light.
(() => {
  const wanted = localStorage.getItem("ajet-theme");
  if (wanted) document.documentElement.dataset.theme = wanted;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const dark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
      document.documentElement.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("ajet-theme", dark ? "light" : "dark");
      dispatchEvent(new Event("themechange"));
    });
  });
})();
