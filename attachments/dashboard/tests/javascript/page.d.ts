// The types of the page: responses of the API, and what modules of the page pass to each other.

type Kind = "metrics" | "evaluations" | "timeline" | "groups";
type Run = import("../../page/source.js").Run;
type Columns = import("../../page/source.js").Columns;
declare const uPlot: any;

// Responses of the API.

interface RunEntry {
	id: string;
	name: string;
	path: string;
	live: boolean;
	included_groups?: number;
	total_groups?: number;
}

interface Runs {
	runs: RunEntry[];
}

interface Exported extends Runs {
	responses: Record<string, any>;
}

interface Finding {
	name: string;
	severity: string;
	fact: string;
	consequence: string;
	advice: string;
	example?: string;
	remedy?: { action: string };
	command?: string;
	first?: number;
	last?: number;
}

interface State {
	live: boolean;
	step: number;
	planned_steps: number | null;
	seconds: number;
	seconds_left: number | null;
	waiting_for: string;
	policy_version: number;
	findings: Finding[];
	ended_findings: Finding[];
	outcomes: Record<string, number>;
	in_flight: Record<string, number> | null;
}

interface CatalogueChart {
	id: string;
	section: string;
	title: string;
	series: Record<string, string>;
	description: string;
	format?: "number" | "percent" | "bytes" | "seconds";
	table?: "metrics" | "evaluations";
	lead?: boolean;
	neutral?: number;
}

interface About {
	profile: Record<string, any> | null;
	profile_changes: Record<string, any>;
	facts: Record<string, any> | null;
	preflight: { findings: Finding[] } | null;
	descriptions: Record<string, string>;
	charts: CatalogueChart[];
	hidden_columns: string[];
}

interface Part {
	columns: Record<string, any[]>;
	minima?: Record<string, (number | null)[]>;
	maxima?: Record<string, (number | null)[]>;
}

interface Rows extends Part {
	cursor: string;
	whole: boolean;
	damaged: number;
	marks?: any[];
	lost_marks?: number;
	dropped?: number;
}

interface News {
	state: State;
	metrics?: Rows;
	evaluations?: Rows;
	timeline?: Rows;
	groups?: Rows;
}

interface Turn {
	sampled: boolean;
	tools?: string[];
	tokens: number;
	characters: number;
}

interface Completion {
	text: string;
	reward: number | null;
	parts: Record<string, number | null>;
	advantage: number | null;
	first_version: number | null;
	last_version: number | null;
	finish_reason: string;
	tokens: number;
	turns: Turn[];
}

interface GroupRecord {
	group_id: number;
	step: number;
	outcome: string;
	reason: string | null;
	detail: string | null;
	prompt: string;
	answer: string;
	type: string;
	environment: string;
	completions: Completion[];
}

interface TokenValues {
	tokens: number[];
	text: string[];
	version: number[];
	sampled_logprob: (number | null)[];
	learner_logprob: (number | null)[];
	ratio: (number | null)[];
	advantage: (number | null)[];
	cut: number[];
	gradient_share: number[];
}

interface Tokens {
	completions: (TokenValues | null)[];
	reason?: string;
}

interface Found {
	group_ids: number[];
}

// Between modules of the page.

interface Place {
	path: string[];
	query: URLSearchParams;
}

interface Context {
	run: Run;
	runs: Run[];
	navigate(hash: string, options?: { run?: string }): void;
	link(hash: string, run?: string): string;
}

// A page in `main`. followed: further runs whose news it shows. route: returns whether it shows the place itself.
interface Page {
	keys?: Record<string, (event: any) => void>;
	help?: string[][];
	followed?: Set<Run>;
	route?(place: Place): boolean;
	update?(run: Run, changed: Kind[]): void;
	close(): void;
}

type PageClass = new (container: HTMLElement, place: Place, context: Context) => Page;

interface Mark {
	x: number;
	kind: string;
	severity?: string;
	text: string;
}

// low, high: a band. base: an area above it, constant between two points.
interface Line {
	label: string;
	values: any[];
	low?: any[];
	high?: any[];
	base?: number;
}

// hide: without values, and with no value but `neutral`. lead: the chart is large. span: lines connect points over
// missing values. lanes: titles of areas, instead of values of the vertical axis.
interface Definition extends Partial<CatalogueChart> {
	data(): { x: number[]; series: Line[] };
	hide?: boolean;
	span?: boolean;
	empty?: string;
	lanes?: string[];
	range?: [number, number];
}
