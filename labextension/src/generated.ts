// Made by `python -m notebook_cluster.server.typescript` from notebook_cluster/protocol/sidebar.py.
// Do not edit. What the server sends has every field; numbers that are not finite are null.

export type SidebarMessage = ServerMessage | Action;
export type ServerMessage = Overview | CurvePoints | Done;

/**
 * Everything except the curves: when a browser connects, and when something has changed, at most twice a second.
 */
export interface Overview {
  type: 'Overview';
  peers: PeerView[];
  clusters: ClusterRow[];
  sharing: Sharing;
  server: ServerInfo;
  engines: EngineChoice[];
}
/**
 * One machine that this cluster uses, or could.
 */
export interface PeerView {
  name: string;
  key: string;
  address: string;
  condition: 'asleep' | 'connected' | 'connecting' | 'found' | 'lost' | 'refused' | 'suspect' | 'untrusted';
  found_by: 'dialled' | 'local' | 'mdns' | 'remembered' | 'typed';
  trusted: boolean;
  device: string;
  reason: string;
  round_trip_ms: number | null;
  jitter_ms: number | null;
  pairing: boolean;
  slept: number | null;
  battery: number | null;
  plugged: boolean;
  kept: string[];
}
/**
 * One cluster of this user. `state` is the last one that was heard.
 */
export interface ClusterRow {
  name: string;
  condition: 'ended' | 'running' | 'unreachable';
  reason: string;
  state: ClusterView | null;
}
/**
 * Everything a panel needs except the series.
 */
export interface ClusterView {
  name: string;
  epoch: number;
  generation: number;
  started: number | null;
  now: number | null;
  nodes: NodeView[];
  peers: PeerView[];
  jobs: JobView[];
  cell: CellView | null;
  queued: number;
  events: EventView[];
  directory: string;
  run_log: string;
  invitation: string;
  kernels: {
    [k: string]: number | null;
  };
  launches: LaunchView[];
  head: string;
}
/**
 * One node. `rank` is None while it is not in the roster.
 */
export interface NodeView {
  name: string;
  rank: number | null;
  peer: string;
  device: string;
  device_name: string;
  incarnation: number;
  condition:
    'asleep' | 'dead' | 'lost' | 'ok' | 'refused' | 'rejoining' | 'replaying' | 'starting' | 'stopping' | 'suspect';
  reason: string;
  log_tail: string[];
  busy: boolean;
  memory_kind: 'RAM' | 'VRAM' | 'unified';
  memory_used: number;
  memory_peak: number;
  memory_total: number;
  cpu: number | null;
  load: number | null;
  temperature: number | null;
  step: number | null;
  loss: number | null;
  scalars: {
    [k: string]: number | null;
  };
  samples_per_s: number | null;
  last_round: number | null;
  round_wait: number | null;
  checkpoint: string;
  checkpoint_time: number | null;
  waiting: string;
  threads: number;
  threads_chosen: boolean;
  replaying: string;
  left_out: string;
  epoch: number;
  epoch_share: number | null;
  of_steps: number | null;
  step_cell: number;
  place: number | null;
  failed: string;
}
/**
 * One model that is trained.
 */
export interface JobView {
  name: string;
  strategy: string;
  round: number;
  attempt: number;
  phase: string;
  members: string[];
  waiting_for: string[];
  parameters: number;
  bytes_sent: number;
  bytes_data_parallel: number;
  hash_mismatches: number;
  state_hash: string;
  waits: RoundWait[];
  loss: number | null;
  loss_round: number | null;
  cell: number;
  settings: {
    [k: string]: string;
  };
}
/**
 * For whom a round was waited.
 */
export interface RoundWait {
  round: number;
  node: string;
  seconds: number | null;
  time: number | null;
}
/**
 * One cell.
 */
export interface CellView {
  id: number;
  source: string;
  status: 'error' | 'interrupted' | 'ok' | 'queued' | 'running';
  nodes: {
    [k: string]: string;
  };
  started: number | null;
  ended: number | null;
  more: number;
  errors: {
    [k: string]: string;
  };
}
/**
 * One line of what happened; `time` is Unix time.
 */
export interface EventView {
  time: number | null;
  level: 'error' | 'info' | 'warning';
  text: string;
}
/**
 * Hosts that were asked of an engine at one time.
 */
export interface LaunchView {
  launch: string;
  name: string;
  condition: 'ended' | 'pending' | 'running' | 'starting';
  hosts: number;
  running: number;
  joined: number;
  text: string;
}
/**
 * Whether this machine is shared, and how it is added elsewhere.
 */
export interface Sharing {
  on: boolean;
  name: string;
  code: string;
  command: string;
  qr_svg_data_url: string;
  keys: string[];
}
/**
 * The server extension.
 */
export interface ServerInfo {
  version: string;
  protocol: number;
}
/**
 * An engine that can start hosts for a cluster, and what it is to be asked for.
 */
export interface EngineChoice {
  name: string;
  title: string;
  hosts: 'either' | 'names' | 'number';
  options: string[];
}
/**
 * Points of a cluster's curves, at most one message a second and cluster.
 */
export interface CurvePoints {
  type: 'CurvePoints';
  cluster: string;
  reset: boolean;
  series: Curve[];
}
/**
 * Points of one curve: `loss`, `memory` (bytes) or a reported scalar. The lists are equally long.
 */
export interface Curve {
  node: string;
  job: string;
  name: string;
  step: number[];
  time: (number | null)[];
  value: (number | null)[];
  run: number;
}
/**
 * Answer to the Action with the same id; 0 when none could be read. `error` is one line, empty when it worked.
 */
export interface Done {
  type: 'Done';
  id: number;
  error: string;
  value: unknown;
}
/**
 * What a person clicked.
 */
export interface Action {
  id: number;
  action:
    | 'add'
    | 'checkpoint'
    | 'detach'
    | 'dismiss'
    | 'hand_over'
    | 'interrupt'
    | 'invite'
    | 'log'
    | 'remove'
    | 'restart'
    | 'share_off'
    | 'share_on'
    | 'start'
    | 'stop';
  cluster?: string;
  target?: string;
  code?: string;
  value?: boolean | number | string | null;
  launch?: StartLaunch | null;
  head?: string;
}
/**
 * Have an engine start agents. Reply value, once it has accepted that: the `launch` of its LaunchView; its hosts
 */
export interface StartLaunch {
  on: string;
  hosts?: number;
  gpus?: number;
  nodes_per_host?: number;
  time?: string;
  partition?: string;
  setup?: string;
  address?: string;
  folder?: string;
  more?: boolean;
}
