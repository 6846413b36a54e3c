/** A cluster that is pulled out of the sidebar: notebooks take it as cells, text fields as text. */

import { MimeData } from '@lumino/coreutils';
import { Drag } from '@lumino/dragdrop';

import { cellsOf } from './cells';

/** What notebooks of JupyterLab accept when cells are dropped on them. */
export const CELLS_TYPE = 'application/vnd.jupyter.cells';

/** Begin to drag `cluster` at this place of the page; resolves when it was dropped, or with `none` after Escape. */
export async function dragCluster(cluster: string, x: number, y: number): Promise<string> {
  const sources = cellsOf(cluster);
  const mimeData = new MimeData();
  mimeData.setData(
    CELLS_TYPE,
    sources.map(source => ({ cell_type: 'code', execution_count: null, metadata: {}, outputs: [], source }))
  );
  mimeData.setData('text/plain', sources.join('\n'));
  const drag = new Drag({ mimeData, dragImage: image(cluster), supportedActions: 'copy', proposedAction: 'copy' });
  try {
    return await drag.start(x, y);
  } finally {
    drag.dispose();
  }
}

function image(cluster: string): HTMLElement {
  const shown = document.createElement('div');
  shown.className = 'nbc-side-drag';
  shown.textContent = `cells for ${cluster}`;
  return shown;
}
