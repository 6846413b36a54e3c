/** A new notebook that starts a cluster, or a class, with its first cell. */

import { JupyterFrontEnd } from '@jupyterlab/application';
import type { NotebookPanel } from '@jupyterlab/notebook';

import { STARTING_CELLS } from './cells';

/** Open one in folder `cwd`, with the server's usual kernel and `cells` ready to be run; null: none could be opened. */
export async function openClusterNotebook(
  app: JupyterFrontEnd,
  cwd: string,
  cells: readonly string[] = STARTING_CELLS
): Promise<NotebookPanel | null> {
  await app.serviceManager.kernelspecs.ready;
  const kernelName = app.serviceManager.kernelspecs.specs?.default;
  const panel = (await app.commands.execute('notebook:create-new', { cwd, kernelName })) as NotebookPanel | undefined;
  if (!panel) {
    return null;
  }
  await panel.context.ready;
  await panel.revealed;
  const { sharedModel } = panel.content.model!;
  const [first, ...others] = cells;
  sharedModel.cells[0].setSource(first);
  sharedModel.insertCells(
    1,
    others.map(source => ({ cell_type: 'code' as const, source, metadata: {}, outputs: [] }))
  );
  panel.content.activeCellIndex = 0;
  panel.content.activate();
  return panel;
}
