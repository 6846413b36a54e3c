// jsdom has neither drag and drop nor pointers, which @lumino names.
globalThis.DragEvent ??= class DragEvent extends MouseEvent {};
globalThis.PointerEvent ??= class PointerEvent extends MouseEvent {};
