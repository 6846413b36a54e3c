/** A line above a notebook whose cluster runs and is not shown in it. */

import * as React from 'react';

import type { ClusterView } from '../generated';
import { nodesUp } from './clusters';
import { Button } from './controls';

export interface IOffer {
  readonly cluster: ClusterView;
  /** The notebook's kernel runs a cell, so that another one would have to wait for its end. */
  readonly isBusy: boolean;
  /** Have the cluster shown in a new cell of the notebook. */
  readonly onShow: () => void;
  readonly onOpen: () => void;
  readonly onClose: () => void;
}

/** `Cluster digits is running cell 4.`, with what can be done about it. */
export function Offer({ cluster, isBusy, onShow, onOpen, onClose }: IOffer): React.JSX.Element {
  const { name, cell } = cluster;
  const what = cell?.status === 'running' ? `is running cell ${cell.id}` : `is running (${nodesUp(cluster)})`;
  return (
    <div className="nbc-offer" role="group" aria-label={`Offer to show cluster ${name}`}>
      <span role="status" title={isBusy ? 'The kernel of this notebook is busy until the cell has ended.' : undefined}>
        {`Cluster ${name} ${what}${isBusy ? '; its output is not shown here' : ''}.`}
      </span>
      {!isBusy && <Button label="Show it here" title="Put its panel into a new cell and run that" onPress={onShow} />}
      <Button label="Dashboard" name={`Dashboard of ${name}`} title="Show it in a tab" onPress={onOpen} />
      <button type="button" className="nbc-side-close" aria-label="Dismiss" onClick={onClose}>
        ×
      </button>
    </div>
  );
}
