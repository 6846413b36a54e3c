/** JupyterLab's part of notebook-cluster: the text of several nodes as tabs, where other frontends show HTML. */

import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';

import { MIME_TYPE } from './page';
import { OutputRenderer } from './renderer';

const extension: IRenderMime.IExtension = {
  id: 'notebook-cluster:output',
  description: 'Shows what the nodes of a cluster print as tabs that can be folded and compared.',
  rendererFactory: {
    safe: true,
    mimeTypes: [MIME_TYPE],
    createRenderer: () => new OutputRenderer()
  },
  // Before text/html (50), which is in the same bundle for everybody else.
  rank: 0,
  dataType: 'json'
};

export default extension;
