//! The binary as users and scripts see it.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FAMILIES: [&str; 4] = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5"];
/// The commands that have a help text of their own.
const COMMANDS: [&[&str]; 13] = [
    &[],
    &["run"],
    &["plan"],
    &["inspect"],
    &["pack"],
    &["verify"],
    &["bench"],
    &["eval"],
    &["eval", "perplexity"],
    &["logits"],
    &["capture"],
    &["compare"],
    &["completions"],
];
/// No step of a test takes as long on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn snowmelt(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_snowmelt"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SNOWMELT_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null());
    command.env("SNOWMELT_HOME", env!("CARGO_TARGET_TMPDIR")).env("NO_COLOR", "1");
    command
}

fn finish(mut command: Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    let code = status.code().unwrap_or_else(|| panic!("{status}: {stderr}"));
    (code, String::from_utf8(stdout).unwrap(), stderr)
}

/// Runs and expects success.
fn ok(args: &[&str]) -> String {
    let (code, stdout, stderr) = finish(snowmelt(args));
    assert_eq!(code, 0, "{args:?}: {stderr}");
    stdout
}

fn ok_json(args: &[&str]) -> Value {
    let stdout = ok(args);
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {stdout}"))
}

/// Runs and expects this exit code; returns stderr.
fn fails(code: i32, args: &[&str]) -> String {
    let (got, stdout, stderr) = finish(snowmelt(args));
    assert_eq!(got, code, "{args:?}: {stdout}{stderr}");
    stderr
}

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(family)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    text(&path).to_owned()
}

fn kill_int(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

// ---------------------------------------------------------------- scripts

#[test]
fn scripts_get_the_ids_of_the_oracle() {
    let folder = TempDir::new().unwrap();
    for family in FAMILIES {
        let model = fixture(family);
        let cases = json_file(&model.join("cases.json"));
        for case in cases["cases"].as_array().unwrap() {
            if case["robust"] != Value::Bool(true) {
                continue;
            }
            let ids = write(&folder, "ids.json", case["prompt"].to_string());
            let prompt = case["prompt"].as_array().unwrap().len();
            let wanted = &case["greedy"];
            let n = wanted.as_array().unwrap().len().to_string();
            let common = ["run", text(&model), "--ids", &ids, "-n", &n, "--temp", "0"];
            let args = [&common[..], &["--ignore-eos", "--json"]].concat();
            let found = ok_json(&args);
            assert_eq!(&found["output_ids"], wanted, "{family} {}", case["name"]);
            assert_eq!(found["prompt_tokens"], prompt);
            assert_eq!(found["finish"], "length");
            assert!(found.get("text").is_none(), "there is no tokenizer");
            assert!(found["timings"]["generation_tokens_per_s"].as_f64().unwrap() > 0.0);
        }
    }
}

#[test]
fn without_a_tokenizer_ids_are_printed() {
    let folder = TempDir::new().unwrap();
    let model = fixture("qwen3_moe");
    let case = &json_file(&model.join("cases.json"))["cases"][0];
    let ids = write(&folder, "ids.json", case["prompt"].to_string());
    let args = ["run", text(&model), "--ids", &ids, "-n", "32", "--temp", "0", "--ignore-eos"];
    let found: Value = serde_json::from_str(&ok(&args)).unwrap();
    assert_eq!(found, case["greedy"]);
    let error = fails(1, &["run", text(&model), "Hello"]);
    assert!(error.contains("has no `tokenizer.json`") && error.contains("--ids"), "{error}");
}

#[test]
fn logits_are_those_of_the_oracle() {
    let folder = TempDir::new().unwrap();
    for family in FAMILIES {
        let model = fixture(family);
        let cases = json_file(&model.join("cases.json"));
        let tolerance = cases["tolerance"]["f32_max_abs"].as_f64().unwrap();
        let n_vocab = cases["vocab_size"].as_u64().unwrap() as usize;
        let wanted = fs::read(model.join("logits.safetensors")).unwrap();
        let wanted = safetensors::SafeTensors::deserialize(&wanted).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let (prompt, greedy) = (case["prompt"].as_array(), case["greedy"].as_array());
            let ids: Vec<Value> = [prompt.unwrap().as_slice(), greedy.unwrap()].concat();
            let file = write(&folder, "ids.json", Value::from(ids.clone()).to_string());
            let out = folder.path().join("logits.safetensors");
            ok(&["logits", text(&model), "--ids", &file, "--out", text(&out)]);
            let found = fs::read(&out).unwrap();
            let found = safetensors::SafeTensors::deserialize(&found).unwrap();
            let found = found.tensor("logits").unwrap();
            assert_eq!(found.shape(), [ids.len(), n_vocab]);
            let (found, wanted_rows) = (floats(found.data()), wanted.tensor(name).unwrap());
            let rows = wanted.tensor(&format!("{name}.rows")).unwrap();
            let rows = rows.data().as_chunks::<4>().0;
            for (row, wanted) in rows.iter().zip(floats(wanted_rows.data()).chunks(n_vocab)) {
                let row = u32::from_le_bytes(*row) as usize;
                for (found, wanted) in found[row * n_vocab..].iter().zip(wanted) {
                    let far = f64::from((found - wanted).abs());
                    assert!(far <= tolerance, "{family} {name} row {row}: {found} {wanted}");
                }
            }
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn the_budget_changes_nothing_but_speed() {
    let common = ["run", "tiny", "Tell me a story.", "-n", "24", "--temp", "0", "--json"];
    let wanted = ok_json(&common);
    let plan = ok_json(&["plan", "tiny", "--json"]);
    let smallest = plan["smallest_flag"].as_str().unwrap();
    let fewest = plan["fewest_slots"].to_string();
    let ways: [&[&str]; 6] = [
        &["--memory", smallest],
        &["--slots", &fewest],
        &["--slots", "64", "--io", "pread", "--prefill-chunk", "3", "--check-reads"],
        &["--residency", "mapped"],
        &["--residency", "resident", "--threads", "3"],
        &["--io", "mmap", "--slots", "40", "--context", "300"],
    ];
    for way in ways {
        let found = ok_json(&[&common[..], way].concat());
        assert_eq!(found["output_ids"], wanted["output_ids"], "{way:?}");
    }
}

#[test]
fn every_budget_of_the_plan_can_be_pasted() {
    let plan = ok_json(&["plan", "tiny", "--json"]);
    let budgets = plan["budgets"].as_array().unwrap();
    assert!(budgets.len() >= 4, "{plan:#}");
    for budget in budgets {
        let bytes = budget["budget_bytes"].to_string();
        let found = ok_json(&["plan", "tiny", "--json", "--memory", &bytes]);
        let (slots, wanted) = (found["slots"].as_u64().unwrap(), budget["slots"].as_u64().unwrap());
        // Processes differ by a little.
        assert!(slots + 60 >= wanted, "{slots} slots, {wanted} promised");
    }
    let table = ok(&["plan", "tiny"]);
    for word in ["budget", "trunk", "left for slots", "smallest budget --memory", "residency"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    for memory in ["1", "20MiB"] {
        let error = fails(1, &["plan", "tiny", "--memory", memory]);
        assert!(error.contains("too small") && error.contains("--memory"), "{error}");
    }
}

// ---------------------------------------------------------------- the built-in model

#[test]
fn tiny_answers_anywhere_with_a_seed() {
    let folder = TempDir::new().unwrap();
    let answer = |seed: &str| {
        let mut command =
            snowmelt(&["run", "tiny", "--seed", seed, "-n", "40", "Tell", "a", "story."]);
        command.current_dir(folder.path());
        let (code, stdout, stderr) = finish(command);
        assert_eq!(code, 0, "{stderr}");
        assert!(stderr.contains("tokens/s"), "{stderr}");
        stdout
    };
    let (first, again, other) = (answer("1"), answer("1"), answer("2"));
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert!(first.split_whitespace().count() > 15 && first.ends_with('\n'), "{first}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written here");
}

#[test]
fn tiny_runs_from_memory_where_nothing_can_be_written() {
    let args = ["run", "tiny", "Hello!", "--temp", "0", "-n", "12", "--json", "--slots", "40"];
    let wanted = ok_json(&args);
    assert_ne!(wanted["plan"]["source"], "memory");
    for home in ["/dev/null/nowhere", "/proc/snowmelt"] {
        let mut command = snowmelt(&args);
        command.env("SNOWMELT_HOME", home);
        let (code, stdout, stderr) = finish(command);
        assert_eq!(code, 0, "{stderr}");
        assert!(stderr.contains("from memory") && stderr.contains(home), "{stderr}");
        assert!(stderr.contains("hint: set SNOWMELT_HOME"), "{stderr}");
        let found: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(found["output_ids"], wanted["output_ids"]);
    }
    let mut command = snowmelt(&["-q", "run", "tiny", "Hello!", "-n", "3"]);
    command.env("SNOWMELT_HOME", "/dev/null/nowhere");
    let (_, _, stderr) = finish(command);
    assert_eq!(stderr, "");
}

#[test]
fn many_starts_unpack_one_model_and_repair_it() {
    let home = TempDir::new().unwrap();
    let models = home.path().join("models");
    let start = || {
        let mut command = snowmelt(&["inspect", "tiny", "--json"]);
        command.env("SNOWMELT_HOME", home.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let all_fine = |damaged: bool| {
        let children: Vec<Child> = (0..4).map(|_| start()).collect();
        let mut warned = 0;
        for child in children {
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{stderr}");
            warned += stderr.matches("is damaged, unpacking `tiny` again").count();
            assert!(damaged || stderr.is_empty(), "{stderr}");
        }
        assert_eq!(warned > 0, damaged);
        let names: Vec<PathBuf> =
            fs::read_dir(&models).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(names.len(), 1, "{names:?}");
        names[0].clone()
    };
    let folder = all_fine(false);
    let trunk = folder.join("trunk.bin");
    let whole = fs::read(&trunk).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damage in [b"cut short", &flipped[..]] {
        fs::write(&trunk, damage).unwrap();
        assert_eq!(all_fine(true), folder);
        assert!(fs::read(&trunk).unwrap() == whole);
    }
    all_fine(false);
}

#[test]
fn the_first_start_needs_no_larger_budget() {
    let plan = |home: &Path| {
        let mut command = snowmelt(&["plan", "tiny", "--json"]);
        command.env("SNOWMELT_HOME", home);
        let (code, stdout, stderr) = finish(command);
        assert_eq!(code, 0, "{stderr}");
        let plan: Value = serde_json::from_str(&stdout).unwrap();
        plan["items"]["process"].as_u64().unwrap()
    };
    let home = TempDir::new().unwrap();
    let (first, second) = (plan(home.path()), plan(home.path()));
    assert!(first < second + (4 << 20), "{first} {second}");
    // Where it is used from memory its pages are memory, and the plan knows.
    let from_memory = plan(Path::new("/dev/null/nowhere"));
    assert!(from_memory > second + (15 << 20), "{from_memory} {second}");
}

#[test]
fn prompts_come_from_stdin_too() {
    let ask = |input: &[u8], args: &[&str]| {
        let mut command = snowmelt(&[&["run", "tiny", "--temp", "0", "-n", "12"], args].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It may refuse before it reads.
        let _ = child.stdin.take().unwrap().write_all(input);
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let wanted = ok(&["run", "tiny", "--temp", "0", "-n", "12", "Hello!"]);
    assert_eq!(ask(b"Hello!\n", &[]).1, wanted);
    let raw = ask(b"Once upon a time", &["--raw"]);
    assert_eq!(raw.0, 0);
    assert_ne!(raw.1, wanted);
    for (input, message) in [(&b""[..], "empty"), (b" \n", "empty"), (b"\xff\xfe", "UTF-8")] {
        let (code, stdout, stderr) = ask(input, &[]);
        assert_eq!((code, stdout.as_str()), (1, ""));
        assert!(stderr.starts_with("error:") && stderr.contains(message), "{stderr}");
    }
}

#[test]
fn answers_end_where_they_are_told() {
    let common = ["run", "tiny", "Tell me a story.", "--temp", "0", "--json"];
    let whole = ok_json(&[&common[..], &["-n", "60"]].concat());
    let story = whole["text"].as_str().unwrap();
    let word = story.split_whitespace().nth(6).unwrap();
    let cut = ok_json(&[&common[..], &["-n", "60", "--stop", word]].concat());
    assert_eq!(cut["finish"], "stop");
    assert_eq!(cut["text"].as_str().unwrap(), &story[..story.find(word).unwrap()]);
    let none = ok_json(&[&common[..], &["-n", "0"]].concat());
    assert_eq!((none["finish"].as_str().unwrap(), none["text"].as_str().unwrap()), ("length", ""));
    let full = ok_json(&[&common[..], &["--context", "40", "--ignore-eos"]].concat());
    assert_eq!(full["finish"], "context");
    let banned = whole["output_ids"][0].to_string() + "=-inf";
    let other = ok_json(&[&common[..], &["-n", "4", "--logit-bias", &banned]].concat());
    assert_ne!(other["output_ids"][0], whole["output_ids"][0]);
}

// ---------------------------------------------------------------- errors

#[test]
fn wrong_usage_ends_with_two() {
    let cases: [&[&str]; 20] = [
        &[],
        &["fly"],
        &["run"],
        &["run", "tiny", "-m", "tiny", "--ids", "x.json"],
        &["run", "-m", "tiny", "tiny", "Hello"],
        &["run", "tiny", "Hello", "--ids", "x.json"],
        &["run", "tiny", "Hello", "--threads", "0"],
        &["run", "tiny", "Hello", "--threads", "10000"],
        &["run", "tiny", "Hello", "--context", "0"],
        &["run", "tiny", "Hello", "--context", "99999999999999999999"],
        &["run", "tiny", "Hello", "--memory", "lots"],
        &["run", "tiny", "Hello", "--memory", "0%"],
        &["run", "tiny", "Hello", "--memory", "-1"],
        &["run", "tiny", "Hello", "--prefill-chunk", "0"],
        &["run", "tiny", "Hello", "--logit-bias", "nonsense"],
        &["run", "tiny", "--raw", "--system", "be kind", "Hello"],
        &["pack", "tiny", "x", "--experts", "q3"],
        &["logits", "tiny", "--out", "x"],
        &["eval", "perplexity", "tiny"],
        &["bench"],
    ];
    for args in cases {
        let error = fails(2, args);
        assert!(!error.is_empty(), "{args:?}");
    }
    let error = fails(2, &["bench"]);
    assert!(error.contains("Usage: snowmelt bench [OPTIONS] MODEL"), "{error}");
}

#[test]
fn sampling_flags_out_of_range_are_named() {
    for (flag, values) in [
        ("--temp", &["-1", "nan", "inf", "warm"][..]),
        ("--top-p", &["0", "1.5", "nan"]),
        ("--min-p", &["-0.1", "2"]),
        ("--repeat-penalty", &["0", "-1", "inf"]),
        ("--presence-penalty", &["inf"]),
        ("--frequency-penalty", &["nan"]),
        ("--logit-bias", &["1=nan", "1=inf"]),
        ("--stop", &[""]),
    ] {
        for value in values {
            let error = fails(2, &["run", "tiny", "Hello", flag, value]);
            assert!(error.contains(flag), "{error}");
        }
    }
}

#[test]
fn variables_are_named_and_empty_ones_count_as_none() {
    let with = |name: &str, value: &str, args: &[&str]| {
        let mut command = snowmelt(args);
        command.env(name, value);
        finish(command)
    };
    let (code, _, error) = with("SNOWMELT_MEMORY", "lots", &["plan", "tiny"]);
    assert!(code == 2 && error.contains("'SNOWMELT_MEMORY'"), "{error}");
    let (code, _, error) = with("SNOWMELT_MEMORY", "64GiB", &["plan", "tiny", "--memory", "lots"]);
    assert!(code == 2 && error.contains("'--memory <SIZE>'"), "{error}");
    let (code, _, error) = with("SNOWMELT_SLOTS", "1", &["plan", "tiny"]);
    assert!(code == 1 && error.contains("SNOWMELT_SLOTS sets `--slots`"), "{error}");
    for name in ["MEMORY", "SLOTS", "THREADS", "IO", "KV", "CHECK_READS", "HOME"] {
        let mut command = snowmelt(&["plan", "tiny"]);
        command.env(format!("SNOWMELT_{name}"), "").env("HOME", env!("CARGO_TARGET_TMPDIR"));
        let (code, _, error) = finish(command);
        assert_eq!((code, error.as_str()), (0, ""), "{name}");
    }
    let model = fixture("qwen3_moe");
    let plan = ["run", text(&model), "--ids", "/dev/stdin", "-n", "0"];
    for value in ["1", "true", "yes", "on"] {
        let mut command = snowmelt(&plan);
        command.env("SNOWMELT_CHECK_READS", value).stdin(ids_file());
        let (code, _, error) = finish(command);
        assert!(code == 1 && error.contains("needs the digests"), "{value}: {error}");
    }
    for value in ["0", "false", "no", "off", ""] {
        let mut command = snowmelt(&plan);
        command.env("SNOWMELT_CHECK_READS", value).stdin(ids_file());
        assert_eq!(finish(command).0, 0, "{value}");
    }
    let (code, _, error) = with("SNOWMELT_CHECK_READS", "maybe", &["plan", "tiny"]);
    assert!(code == 2 && error.contains("'SNOWMELT_CHECK_READS'"), "{error}");
}

fn ids_file() -> fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"[1, 2, 3]").unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    file
}

#[test]
fn what_does_not_fit_names_what_helps() {
    let folder = TempDir::new().unwrap();
    let long = write(&folder, "long.json", format!("{:?}", vec![1; 3000]));
    let out = text(&folder.path().join("out")).to_owned();
    let cases: [(&[&str], &str); 5] = [
        (&["run", "tiny", "--ids", &long], "a shorter prompt fits"),
        (&["logits", "tiny", "--ids", &long, "--out", &out], "fewer ids fit"),
        (&["eval", "perplexity", "tiny", "--ids", &long, "--window", "2500"], "`--window`"),
        (&["bench", "tiny", "--prompt", "2048", "--gen", "2"], "`--prompt` and `--gen`"),
        (&["run", "tiny", "--ids", &long, "--context", "99"], "can be raised to 2048"),
    ];
    for (args, hint) in cases {
        let error = fails(1, args);
        let longer = error.contains("--context");
        assert!(error.contains("do not fit") && error.contains(hint), "{error}");
        assert_eq!(longer, hint.contains("raised"), "{error}");
    }
    let endless = write(&folder, "endless.txt", "a ".repeat(1 << 20));
    let mut command = snowmelt(&["run", "tiny"]);
    command.stdin(fs::File::open(endless).unwrap());
    let (code, _, error) = finish(command);
    assert!(code == 1 && error.contains("too long: 2.0 MiB"), "{error}");
}

#[test]
fn a_relative_home_is_not_written_to() {
    let folder = TempDir::new().unwrap();
    let mut command = snowmelt(&["run", "tiny", "Hello", "-n", "1", "-v"]);
    command.env_remove("SNOWMELT_HOME").env("HOME", "relative").current_dir(folder.path());
    command.env_remove("XDG_DATA_HOME").env_remove("XDG_STATE_HOME");
    let (code, _, error) = finish(command);
    assert!(code == 0 && error.contains("`HOME` is `relative`"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn bad_input_is_named() {
    let folder = TempDir::new().unwrap();
    let (path, file) = (folder.path(), |name, content: &str| write(&folder, name, content));
    let model = fixture("qwen3_moe");
    let model = text(&model);
    let missing = text(&path.join("missing")).to_owned();
    let not_utf8 = write(&folder, "text.bin", b"abc\xff");
    let good = file("good.json", "[1, 2, 3]");
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["run", "tinny", "Hello"], "did you mean `tiny`?"),
        (vec!["run", &missing, "Hello"], "there is no model"),
        (vec!["inspect", text(path)], "holds no model"),
        (vec!["inspect", &good], "is a file, expected a folder"),
        (vec!["run", "tiny", "Hello", "--memory", "1"], "is too small"),
        (vec!["run", "tiny", "Hello", "--slots", "0"], "too few"),
        (vec!["run", "tiny", "Hello", "--context", "4000000000"], "out of range"),
        (vec!["run", "tiny", "Hello", "--logit-bias", "4000000=1"], "`--logit-bias`"),
        (vec!["run", model, "--ids", &good, "--stop", "x"], "`--stop` needs"),
        (vec!["plan", "tiny", "--memory", "36MiB", "--slots", "250"], "fewer `--slots`"),
        (vec!["run", "tiny", ""], "the prompt is empty"),
        (vec!["run", "tiny", "--ids", &missing], "could not read"),
        (vec!["logits", model, "--ids", &good, "--out", text(path)], "is a folder"),
        (vec!["logits", model, "--ids", &good, "--out", "/dev/null/x"], "could not write"),
        (vec!["eval", "perplexity", "tiny", &not_utf8], "byte 3"),
        (vec!["eval", "perplexity", model, "--ids", &good], "window"),
        (vec!["pack", model, text(path)], "exists"),
        (vec!["bench", "--ceilings", &missing], "could not look at"),
        (vec!["verify", &missing], "there is no model"),
    ];
    for (args, message) in &cases {
        let error = fails(1, args);
        assert!(error.starts_with("error: ") && error.contains(message), "{args:?}: {error}");
    }
    for (content, message) in [
        ("", "is not JSON"),
        ("{}", "holds no array"),
        ("[1, -2]", "entry 1 is `-2`"),
        ("[1.5]", "entry 0"),
        ("[4294967296]", "entry 0"),
        ("[\"1\"]", "entry 0"),
        ("[]", "empty"),
        ("[1, 2, 999999]", "999999"),
    ] {
        let bad = file("bad.json", content);
        let error = fails(1, &["run", model, "--ids", &bad, "-n", "1"]);
        assert!(error.starts_with("error: ") && error.contains(message), "{content}: {error}");
    }
    let crowd: Vec<u32> = vec![1; 5000];
    let crowd = file("crowd.json", &format!("{crowd:?}"));
    assert!(fails(1, &["run", "tiny", "--ids", &crowd]).contains("do not fit"));
}

// ---------------------------------------------------------------- terminal manners

#[test]
fn help_fits_eighty_columns() {
    for command in COMMANDS {
        let mut narrow = snowmelt(&[command, &["--help"]].concat());
        narrow.env("COLUMNS", "80");
        let (code, stdout, stderr) = finish(narrow);
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.contains("Usage: snowmelt"), "{stdout}");
        for line in stdout.lines() {
            assert!(line.chars().count() <= 80, "{command:?}: {line}");
        }
    }
    assert!(ok(&["--version"]).starts_with("snowmelt "));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let cases: [&[&str]; 3] = [
        &["run", "tiny", "Tell me a story.", "--ignore-eos"],
        &["completions", "bash"],
        &["inspect", "tiny", "--json"],
    ];
    for args in cases {
        let mut command = snowmelt(args);
        // Closed before the program starts: a short output would fit into the pipe.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let status = wait(&mut child);
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((status.code(), stderr.as_str()), (Some(141), ""), "{args:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_help_text_that_cannot_be_written_is_a_failure() {
    for args in [&["--help"][..], &["run", "--help"], &["--version"], &["completions", "zsh"]] {
        let mut command = snowmelt(args);
        command.stdout(fs::File::create("/dev/full").unwrap()).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && error.contains("could not write to stdout"),
            "{args:?}: {error}"
        );
    }
}

#[test]
fn ctrl_c_leaves_nothing_of_logits() {
    let folder = TempDir::new().unwrap();
    let ids = write(&folder, "ids.json", format!("{:?}", vec![1; 2000]));
    let out = write(&folder, "out", "old");
    // What a killed process left goes, what a living one writes or another name has stays.
    let abandoned = write(&folder, "out.4000000000.partial", "half");
    let held = fs::File::create(folder.path().join("out.7.partial")).unwrap();
    held.lock().unwrap();
    write(&folder, "other.7.partial", "half");
    let mut command = snowmelt(&["logits", "tiny", "--ids", &ids, "--out", &out]);
    command.args(["--threads", "1", "--prefill-chunk", "1"]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    while Path::new(&abandoned).exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    kill_int(&child);
    let status = wait(&mut child);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted") && stderr.contains("as it was"), "{stderr}");
    assert_eq!(fs::read(&out).unwrap(), b"old");
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["ids.json", "other.7.partial", "out", "out.7.partial"]);
}

#[test]
fn ctrl_c_stops_an_answer() {
    let mut command = snowmelt(&["run", "tiny", "Tell me a story.", "--ignore-eos"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    kill_int(&child);
    let status = wait(&mut child);
    let (mut rest, mut stderr) = (String::new(), String::new());
    stdout.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(130), "{stderr}");
    assert!(rest.ends_with('\n') && stderr.contains("tokens/s"), "{rest} {stderr}");
}

#[test]
fn ctrl_c_leaves_while_nothing_can_stop_halfway() {
    let folder = TempDir::new().unwrap();
    // stdin stays open: it waits for the prompt.
    let mut command = snowmelt(&["run", "tiny"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir(folder.path());
    let mut child = command.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    kill_int(&child);
    let status = wait(&mut child);
    // Before the handler is there the system ends it.
    assert!(matches!(status.code(), Some(130) | None), "{status}");
}

// ---------------------------------------------------------------- containers

#[test]
fn an_interrupted_pack_continues_and_damage_is_found() {
    let folder = TempDir::new().unwrap();
    let mut stopped = None;
    for attempt in 0..10 {
        let target = folder.path().join(format!("packed-{attempt}"));
        let mut command = snowmelt(&["pack", "tiny", text(&target), "--experts", "bf16"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let partial = PathBuf::from(format!("{}.partial", target.display()));
        while !partial.join("experts.bin").exists() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        kill_int(&child);
        let status = wait(&mut child);
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        if status.code() == Some(130) {
            assert!(stderr.contains("continues") && partial.exists(), "{stderr}");
            stopped = Some(target);
            break;
        }
    }
    let target = stopped.expect("one of ten is caught");
    let error = fails(1, &["inspect", text(&target)]);
    assert!(error.contains("unfinished pack"), "{error}");
    let said = ok(&["pack", "tiny", text(&target), "--experts", "bf16"]);
    assert!(said.starts_with("packed "), "{said}");
    let said = ok(&["verify", text(&target)]);
    assert!(said.contains("all digests match"), "{said}");

    let flip = |file: &Path, places: usize| {
        let mut bytes = fs::read(file).unwrap();
        let step = bytes.len() / places;
        bytes.iter_mut().skip(step / 2).step_by(step).take(places).for_each(|byte| *byte ^= 1);
        fs::write(file, bytes).unwrap();
    };
    let (experts, trunk) = (target.join("experts.bin"), target.join("trunk.bin"));
    flip(&experts, 30);
    flip(&trunk, 1);
    let error = fails(3, &["verify", text(&target)]);
    assert!(error.contains("tensor `") && error.contains("trunk.bin"), "{error}");
    assert!(error.contains("expert `") && error.contains("experts.bin"), "{error}");
    assert!(error.contains("31 parts are damaged (11 more than listed)\nhint:"), "{error}");
    assert_eq!(error.lines().count(), 20 + 2, "{error}");
    flip(&trunk, 1);
    let error = fails(
        1,
        &["run", text(&target), "Hello", "--check-reads", "--slots", "40", "--ignore-eos"],
    );
    assert!(error.starts_with("error:"), "{error}");
    fs::write(&experts, "short").unwrap();
    fails(3, &["verify", text(&target)]);
}

/// What `verify` and `inspect` say of a container with an edited manifest and the right digest.
fn edited(target: &Path, field: &str, value: Value) -> [(i32, String, String); 2] {
    let path = target.join("manifest.json");
    let (whole, mut manifest) = (fs::read(&path).unwrap(), json_file(&path));
    manifest[field] = value;
    let text_of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let digest = blake3::hash(bytes).to_hex();
        fs::write(target.join("manifest.blake3"), format!("{digest}\n")).unwrap();
    };
    text_of(manifest.to_string().as_bytes());
    let said = ["verify", "inspect"].map(|command| finish(snowmelt(&[command, text(target)])));
    text_of(&whole);
    said
}

#[test]
fn what_is_no_sound_container_is_told_apart() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("packed");
    ok(&["pack", text(&fixture("qwen3_moe")), text(&target)]);
    let [verify, inspect] = edited(&target, "family", "gemma".into());
    assert_eq!((verify.0, inspect.0), (3, 1));
    for error in [&verify.2, &inspect.2] {
        assert!(error.contains("`gemma`") && error.contains("`qwen3_moe`"), "{error}");
    }
    assert!(verify.1.ends_with("contradicts itself\n"), "{}", verify.1);
    let [verify, _] = edited(&target, "version", 7.into());
    let (code, stdout, error) = verify;
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(error.contains("version 7`") && error.contains("version 1`"), "{error}");
    ok(&["verify", text(&target)]);
    fs::remove_file(target.join("manifest.json")).unwrap();
    let (code, stdout, error) = finish(snowmelt(&["verify", text(&target)]));
    assert_eq!(code, 3);
    assert!(stdout.ends_with("is no model\n"), "{stdout}");
    assert!(error.contains("a packed model without its `manifest.json`"), "{error}");
    fails(3, &["verify", text(folder.path())]);
}

#[test]
fn packing_as_it_is_keeps_the_logits() {
    let folder = TempDir::new().unwrap();
    let model = fixture("qwen3_5_moe");
    let packed = folder.path().join("packed");
    ok(&["pack", text(&model), text(&packed)]);
    ok(&["verify", text(&model)]);
    ok(&["verify", "tiny"]);
    let ids = write(&folder, "ids.json", "[1, 2, 3, 4, 5, 6, 7, 8, 9]");
    let logits = |model: &Path, more: &[&str]| {
        let out = folder.path().join("logits");
        let args = ["logits", text(model), "--ids", &ids, "--out", text(&out)];
        ok(&[&args[..], more].concat());
        fs::read(out).unwrap()
    };
    let wanted = logits(&model, &[]);
    assert_eq!(logits(&packed, &[]), wanted);
    assert_eq!(logits(&packed, &["--prefill-chunk", "2", "--threads", "1"]), wanted);
}

// ---------------------------------------------------------------- measuring

#[test]
fn perplexity_is_measured_of_texts_and_ids() {
    let folder = TempDir::new().unwrap();
    let story = ok(&["run", "tiny", "Tell me a story.", "--seed", "3", "-n", "200"]);
    let file = write(&folder, "story.txt", &story);
    let args = ["eval", "perplexity", "tiny", &file, "--window", "32"];
    let found = ok_json(&[&args[..], &["--json"]].concat());
    let value = found["perplexity"].as_f64().unwrap();
    assert!(value > 1.0 && value < 60.0, "{found:#}");
    let windows = found["windows"].as_u64().unwrap();
    assert_eq!(found["predictions"], windows * 31);
    assert!(ok(&args).starts_with("perplexity "));
    let ids: Vec<u32> = (0..64).map(|id| id * 37 % 4096).collect();
    let ids = write(&folder, "ids.json", format!("{ids:?}"));
    let noise = ["eval", "perplexity", "tiny", "--ids", &ids, "--window", "32", "--json"];
    assert!(ok_json(&noise)["perplexity"].as_f64().unwrap() > value);
}

#[test]
fn bench_measures_and_records() {
    let folder = TempDir::new().unwrap();
    let common = ["bench", "tiny", "--prompt", "16", "--gen", "4", "--repeat", "2"];
    let found = ok_json(&[&common[..], &["--json", "--slots", "40"]].concat());
    for name in ["prompt_tokens_per_s", "decode_tokens_per_s", "disk_bytes_per_token"] {
        assert!(found[name].as_f64().unwrap() > 0.0, "{name}: {found:#}");
    }
    assert!(ok(&common).contains("tokens/s"));
    let words =
        write(&folder, "text.txt", "The old man opened the door and saw the snow. ".repeat(9));
    let routes = folder.path().join("routes.txt");
    ok(&["bench", "tiny", "--text", &words, "--record-routes", text(&routes)]);
    let trace = snowmelt_expert_store::sim::Trace::parse(&fs::read(&routes).unwrap()).unwrap();
    let census = ok_json(&["inspect", "tiny", "--json"]);
    let layers = census["experts"]["layers"].as_u64().unwrap();
    let top_k = census["experts"]["top_k"].as_u64().unwrap();
    assert!(trace.n_steps() > 60, "{}", trace.n_steps());
    assert_eq!(trace.accesses() as u64, trace.n_steps() * layers * top_k);
}

#[test]
fn inspect_tells_what_a_model_is() {
    for family in FAMILIES {
        let model = fixture(family);
        let found = ok_json(&["inspect", text(&model), "--json"]);
        assert_eq!(found["family"], family);
        assert_eq!(found["n_vocab"], 320);
        assert!(found["parameters"].as_u64().unwrap() > 10_000);
        assert!(ok(&["inspect", text(&model)]).contains(family));
    }
    let found = ok_json(&["inspect", "-m", "tiny", "--json"]);
    assert_eq!(found["parameters"], 30_243_760);
    assert_eq!(found["experts"]["count"], 256);
}

#[test]
fn logits_replace_no_device_and_follow_links() {
    let folder = TempDir::new().unwrap();
    let [ids, pipe, real, link] =
        ["ids.json", "pipe", "real", "link"].map(|name| folder.path().join(name));
    fs::write(&ids, "[1, 2, 3]").unwrap();
    fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle/qwen3_moe");
    let logits = |out: &Path| {
        let mut command = snowmelt(&["logits"]);
        command.arg(&model).arg("--ids").arg(&ids).arg("--out").arg(out);
        finish(command)
    };
    let (code, _, stderr) = logits(&pipe);
    assert!(code == 1 && stderr.contains("is a device or a pipe"), "{code}: {stderr}");
    assert!(!fs::metadata(&pipe).unwrap().is_file());
    assert_eq!(logits(&link).0, 0);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::metadata(&real).unwrap().len() > 320 * 4);
}
