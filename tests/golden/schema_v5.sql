PRAGMA user_version = 5;

PRAGMA application_id = 1717920886;

CREATE TABLE symbol (
  id INTEGER NOT NULL,
  text TEXT NOT NULL,
  PRIMARY KEY (id)
);

CREATE UNIQUE INDEX symbol_by_text ON symbol (text);

CREATE TABLE run (
  id INTEGER NOT NULL,
  name TEXT NOT NULL,
  host TEXT NOT NULL,
  topology TEXT,
  config TEXT NOT NULL,
  seed INTEGER,
  started REAL,
  finished REAL,
  versions TEXT NOT NULL,
  tables TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL,
  PRIMARY KEY (id)
);

CREATE TABLE metric (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  name INTEGER NOT NULL,
  value REAL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX metric_by_run_name_round_node_at_value_layer ON metric (run, name, round, node, at, value, layer);

CREATE TABLE event (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  level INTEGER NOT NULL,
  name INTEGER NOT NULL,
  message TEXT NOT NULL,
  data TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX event_by_run_level ON event (run, level);

CREATE TABLE span (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  name INTEGER NOT NULL,
  seconds REAL,
  trace TEXT NOT NULL,
  id TEXT NOT NULL,
  parent TEXT,
  attributes TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX span_by_run_round ON span (run, round);

CREATE TABLE transfer (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  sender INTEGER NOT NULL,
  receiver INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  raw_bytes INTEGER NOT NULL,
  seconds REAL,
  kind INTEGER NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX transfer_by_run_round ON transfer (run, round);

CREATE TABLE sketch (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  "values" BLOB NOT NULL,
  digest TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
, version INTEGER NOT NULL DEFAULT 1);

CREATE INDEX sketch_by_run_round ON sketch (run, round);

CREATE TABLE finding (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  issue INTEGER NOT NULL,
  severity INTEGER NOT NULL,
  confidence REAL,
  message TEXT NOT NULL,
  evidence TEXT NOT NULL,
  suspects TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX finding_by_run_round ON finding (run, round);

CREATE TABLE action (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  finding TEXT NOT NULL,
  kind INTEGER NOT NULL,
  target INTEGER,
  arguments TEXT NOT NULL,
  status INTEGER NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX action_by_run_round ON action (run, round);

CREATE TABLE snapshot (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  kind INTEGER NOT NULL,
  digest TEXT NOT NULL,
  bytes INTEGER NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX snapshot_by_run_round ON snapshot (run, round);

CREATE TABLE layer_table (
  id INTEGER NOT NULL,
  rows TEXT NOT NULL,
  PRIMARY KEY (id)
);

CREATE TABLE layer (
  layer_table INTEGER NOT NULL,
  position INTEGER NOT NULL,
  name INTEGER NOT NULL,
  shape TEXT NOT NULL,
  dtype TEXT NOT NULL,
  PRIMARY KEY (layer_table, position)
);

CREATE INDEX layer_by_layer_table_name ON layer (layer_table, name);

CREATE TABLE layer_block (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  family INTEGER NOT NULL,
  layer_table INTEGER NOT NULL,
  layers INTEGER NOT NULL,
  entries INTEGER NOT NULL,
  first_round INTEGER,
  last_round INTEGER,
  coordinates BLOB NOT NULL,
  details BLOB NOT NULL
, whole INTEGER);

CREATE INDEX layer_block_by_run_family_first_round ON layer_block (run, family, first_round);

CREATE TABLE layer_matrix (
  block INTEGER NOT NULL,
  layer INTEGER NOT NULL,
  numbers BLOB NOT NULL,
  PRIMARY KEY (block, layer)
);

CREATE TABLE run_round (
  run INTEGER NOT NULL,
  round INTEGER NOT NULL,
  first REAL,
  last REAL,
  PRIMARY KEY (run, round)
);

CREATE TABLE run_node (
  run INTEGER NOT NULL,
  node INTEGER NOT NULL,
  PRIMARY KEY (run, node)
);

CREATE TABLE delivered (
  run INTEGER NOT NULL,
  source INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  PRIMARY KEY (run, source, first)
);

CREATE TABLE truth (
  arrival INTEGER PRIMARY KEY NOT NULL,
  run INTEGER NOT NULL,
  round INTEGER,
  node INTEGER,
  step INTEGER,
  layer INTEGER,
  "group" INTEGER,
  at REAL,
  kind INTEGER NOT NULL,
  nodes TEXT NOT NULL,
  since INTEGER NOT NULL,
  until INTEGER,
  data TEXT NOT NULL,
  source INTEGER NOT NULL,
  sequence INTEGER NOT NULL
);

CREATE INDEX truth_by_run ON truth (run);

CREATE INDEX layer_block_by_run_family_whole ON layer_block (run, family, whole);

CREATE TABLE mark (
  run INTEGER NOT NULL,
  kind TEXT NOT NULL,
  target TEXT NOT NULL,
  value TEXT NOT NULL,
  at REAL,
  PRIMARY KEY (run, kind, target)
);

CREATE VIEW runs AS
SELECT id_symbol.text AS id, t.name, t.host, t.topology, t.config, t.seed, t.started, t.finished, t.versions, t.tables, source_symbol.text AS source, t.sequence
FROM run AS t
JOIN symbol AS id_symbol ON id_symbol.id = t.id
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW metrics AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, name_symbol.text AS name, t.value, source_symbol.text AS source, t.sequence
FROM metric AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS name_symbol ON name_symbol.id = t.name
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW events AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, level_symbol.text AS level, name_symbol.text AS name, t.message, t.data, source_symbol.text AS source, t.sequence
FROM event AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS level_symbol ON level_symbol.id = t.level
JOIN symbol AS name_symbol ON name_symbol.id = t.name
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW spans AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, name_symbol.text AS name, t.seconds, t.trace, t.id, t.parent, t.attributes, source_symbol.text AS source, t.sequence
FROM span AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS name_symbol ON name_symbol.id = t.name
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW transfers AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, sender_symbol.text AS sender, receiver_symbol.text AS receiver, t.bytes, t.raw_bytes, t.seconds, kind_symbol.text AS kind, source_symbol.text AS source, t.sequence
FROM transfer AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS sender_symbol ON sender_symbol.id = t.sender
JOIN symbol AS receiver_symbol ON receiver_symbol.id = t.receiver
JOIN symbol AS kind_symbol ON kind_symbol.id = t.kind
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW sketches AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, t."values", t.digest, source_symbol.text AS source, t.sequence, t.version
FROM sketch AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW findings AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, issue_symbol.text AS issue, severity_symbol.text AS severity, t.confidence, t.message, t.evidence, t.suspects, source_symbol.text AS source, t.sequence
FROM finding AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS issue_symbol ON issue_symbol.id = t.issue
JOIN symbol AS severity_symbol ON severity_symbol.id = t.severity
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW actions AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, t.finding, kind_symbol.text AS kind, target_symbol.text AS target, t.arguments, status_symbol.text AS status, source_symbol.text AS source, t.sequence
FROM action AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS kind_symbol ON kind_symbol.id = t.kind
LEFT JOIN symbol AS target_symbol ON target_symbol.id = t.target
JOIN symbol AS status_symbol ON status_symbol.id = t.status
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW snapshots AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, kind_symbol.text AS kind, t.digest, t.bytes, source_symbol.text AS source, t.sequence
FROM snapshot AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS kind_symbol ON kind_symbol.id = t.kind
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW layers AS
SELECT layer_table_symbol.text AS layer_table, t.position, name_symbol.text AS name, t.shape, t.dtype
FROM layer AS t
JOIN symbol AS layer_table_symbol ON layer_table_symbol.id = t.layer_table
JOIN symbol AS name_symbol ON name_symbol.id = t.name;

CREATE VIEW truths AS
SELECT t.arrival, run_symbol.text AS run, t.round, node_symbol.text AS node, t.step, layer_symbol.text AS layer, group_symbol.text AS "group", t.at, kind_symbol.text AS kind, t.nodes, t.since, t.until, t.data, source_symbol.text AS source, t.sequence
FROM truth AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run
LEFT JOIN symbol AS node_symbol ON node_symbol.id = t.node
LEFT JOIN symbol AS layer_symbol ON layer_symbol.id = t.layer
LEFT JOIN symbol AS group_symbol ON group_symbol.id = t."group"
JOIN symbol AS kind_symbol ON kind_symbol.id = t.kind
JOIN symbol AS source_symbol ON source_symbol.id = t.source;

CREATE VIEW marks AS
SELECT run_symbol.text AS run, t.kind, t.target, t.value, t.at
FROM mark AS t
JOIN symbol AS run_symbol ON run_symbol.id = t.run;

CREATE VIEW layer_statistics AS
SELECT run_symbol.text AS run, json_extract(e.value, '$[0]') AS round, node_symbol.text AS node, json_extract(e.value, '$[2]') AS step, group_symbol.text AS "group", json_extract(e.value, '$[4]') AS at,
  family_symbol.text AS family, layer_symbol.text AS layer,
  json_extract(e.value, '$[5]') AS count, json_extract(e.value, '$[6]') AS mean, json_extract(e.value, '$[7]') AS std, json_extract(e.value, '$[8]') AS l2, json_extract(e.value, '$[9]') AS min, json_extract(e.value, '$[10]') AS max, json_extract(e.value, '$[11]') AS absmax, json_extract(e.value, '$[12]') AS mean_magnitude, json_extract(e.value, '$[13]') AS sparsity, json_extract(e.value, '$[14]') AS zeros, json_extract(e.value, '$[15]') AS nans, json_extract(e.value, '$[16]') AS infs
FROM layer_block AS b
JOIN symbol AS run_symbol ON run_symbol.id = b.run
JOIN symbol AS family_symbol ON family_symbol.id = b.family
JOIN layer AS l ON l.layer_table = b.layer_table
JOIN symbol AS layer_symbol ON layer_symbol.id = l.name
JOIN layer_matrix AS m ON m.block = b.arrival AND m.layer IN (-1, l.position)
JOIN json_each(fedvitals_layer(family_symbol.text, l.position, m.layer, b.layers, b.entries, b.coordinates, b.details, m.numbers)) AS e
LEFT JOIN symbol AS node_symbol ON node_symbol.id = json_extract(e.value, '$[1]')
LEFT JOIN symbol AS group_symbol ON group_symbol.id = json_extract(e.value, '$[3]');
