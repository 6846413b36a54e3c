// jsdom has no drag and drop, which @lumino/widgets names when it is loaded.
globalThis.DragEvent ??= class DragEvent extends MouseEvent {};
