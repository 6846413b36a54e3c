import { LabIcon } from '@jupyterlab/ui-components';

const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" d="M11 8.9V11H6v3h2v-1h8v1h2v-3h-5V8.9z"/>
  <rect class="jp-icon3" fill="#616161" x="8" y="2" width="8" height="7" rx="1.5"/>
  <rect class="jp-icon3" fill="#616161" x="2" y="14" width="9" height="7" rx="1.5"/>
  <rect class="jp-icon3" fill="#616161" x="13" y="14" width="9" height="7" rx="1.5"/>
</svg>`;

/** Three machines that hang together; JupyterLab gives it the colour of its other icons. */
export const clusterIcon = new LabIcon({ name: 'notebook-cluster:cluster', svgstr: SVG });

/** The same for a launcher, whose tiles of notebooks have pictures. */
export const CLUSTER_PICTURE = `data:image/svg+xml,${encodeURIComponent(SVG)}`;
