"""What the pathologies of runs mean; ``findings/pathologies.py`` says how each is seen in a record."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_LIST = "A problem people meet often in public issue threads; what a record shows of it is this project's."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="run.replicas_diverge",
        title="Ranks train different models",
        meaning="Ranks that should hold the same parameter hold different bits of it.",
        why="From that step on every rank trains a model of its own; gradients are averaged over models "
        "that differ, and what is saved is one of them.",
        confirm="The event replica_divergence names the parameter and the ranks (pgs report RUN). Compare a "
        "hash of that parameter on two ranks.",
        fix="Go back to a checkpoint from before the step (train.resume_from). Take out what changes "
        "parameters or buffers on one rank only, and seed every rank's initial weights alike.",
        source="How data parallelism works: DistributedDataParallel averages gradients and never compares "
        "parameters again. docs/alarms.md, Ranks that stand apart.",
    ),
    Entry(
        check="run.no_zero_grad",
        title="Gradients are never reset",
        meaning="Consecutive gradients point the same way (median cosine near 1) while their norm grows.",
        why="Every step applies the sum of all gradients so far. The effective learning rate grows with "
        "each step until the run diverges.",
        confirm="Print the norm of one parameter's gradient right before backward(): it should be None or 0.",
        fix="Call optimizer.zero_grad() after every optimizer.step(), on the optimizer that holds the "
        "model's parameters. pgs train does.",
        source="PyTorch adds gradients up until they are reset (torch.optim, zero_grad). The sum of t like "
        "gradients has t times the norm and a cosine with its predecessor near 1.",
    ),
    Entry(
        check="run.no_loss_tokens",
        title="Steps without a loss-bearing token",
        meaning="At some steps loss and gradient norm are exactly 0, or no loss-bearing token was counted.",
        why="Such a step teaches nothing and still costs its time; in the mean of a micro-batch it is 0/0, "
        "which is how NaN gets into weights.",
        confirm="pgs validate --config FILE counts samples without a loss-bearing token and says where they "
        "were lost; pgs inspect shows one.",
        fix="data.max_seq_length: longer, where answers are cut off. model.chat_template: a template that "
        "marks the answers, where none are found. Take rows without an answer out of the data.",
        source=_LIST,
    ),
    Entry(
        check="run.lr_schedule",
        title="The learning rate ends long before the run",
        meaning="The learning rate falls sooner or later than its schedule has it, where the configuration "
        "is known; otherwise it reached its lowest long before the last step, or reached it and rose again.",
        why="What follows trains with next to no learning rate, or with a second schedule that nobody "
        "planned.",
        confirm="Plot train/lr against train/global_step (pgs report RUN), beside the schedule you meant.",
        fix="Step the scheduler once an optimizer step, and give it the number of optimizer steps "
        "(train.max_steps, or train.epochs), not of micro-batches. pgs train does both.",
        source=_LIST,
    ),
    Entry(
        check="run.data_after_resume",
        title="Data repeated or changed by a resume",
        meaning="After a resume, batches come that the same pass had before, or steps that were run again "
        "get other batches than the first time.",
        why="Some rows are trained on twice and others never; two runs can no longer be compared.",
        confirm="Compare train/batch, the fingerprint of a step's rows, before and after the resume in "
        "metrics.jsonl.",
        fix="train.resume_from: auto with the same data, train.seed, batch size and ranks, which pgs train "
        "checks. A loop of your own has to save its position in the data with every checkpoint.",
        source=_LIST,
    ),
    Entry(
        check="run.worse_after_resume",
        title="The loss jumps up at a resume",
        meaning="Right after a resume the loss is well above all that it was right before.",
        why="What was loaded is not what was saved. All progress up to the checkpoint may be lost without "
        "an error.",
        confirm="Load the checkpoint in two lines and evaluate it. Where the model ties its embedding and "
        "its head, check that both are still one tensor (data_ptr) and that neither was made anew.",
        fix="train.resume_from: another checkpoint. Save and load with save_pretrained and from_pretrained, "
        "which keep ties; load the optimizer's state as well.",
        source=_LIST,
    ),
    Entry(
        check="run.updates_lost",
        title="Updates round away",
        meaning="Most elements of the weights do not change in a step, although they have a gradient.",
        why="A bfloat16 number has 8 bits of precision: an update below about 1/256 of a weight is lost. "
        "The loss then stalls at a plateau that looks like convergence.",
        confirm="health/update_lost_pct with its standard error. Train the same steps with "
        "model.torch_dtype: float32: the plateau should go on falling.",
        fix="model.torch_dtype: float32, or model.lora, whose small weights have room for small updates.",
        source="docs/signals.md, Update ratio and lost updates, with the test that measures it; Zamirai et "
        "al. 2020, Revisiting BFloat16 Training (arXiv 2010.06192).",
    ),
    Entry(
        check="run.lr_too_high",
        title="The learning rate is too high",
        meaning="Consecutive gradients point against each other; or the loss climbs far above where it "
        "began, or rises at the end and does not come back; or it spikes or is lost while the gradient norm "
        "grows.",
        why="Steps overshoot and undo each other: progress stops, and in the end loss and weights are lost.",
        confirm="health/grad_cosine_sim below 0 and train/grad_norm_raw growing. A hundred steps with a "
        "third of the learning rate should show neither.",
        fix="train.learning_rate: a third of what it is. If it happens at the start only, "
        "train.warmup_ratio: higher. train.max_grad_norm: 1.0 bounds single steps.",
        source="The project's table of pathologies. On quadratic losses gradients alternate in sign from a "
        "learning rate of 1/curvature on, and diverge from 2/curvature.",
    ),
    Entry(
        check="run.packing_leak",
        title="Packed samples see each other",
        meaning="The loss of a packed run differs from that of an unpacked one on the same tokens, from the "
        "first ones on (pgs explain RUN --unpacked RUN2 compares them); or the trainer packs in a way that "
        "cannot keep samples apart.",
        why="Tokens attend to a neighbour that has nothing to do with them: the model learns from context "
        "that it will never have.",
        confirm="Train a few steps with data.packing: false and the same seed and compare the first losses. "
        "pgs validate perturbs one packed document and looks whether another's output moves.",
        fix="data.packing: false until it is explained, and report it: packed samples are kept apart by "
        "design (docs/data.md).",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.data_quality",
        title="Frequent spikes of the loss",
        meaning="The loss jumps again and again, for more steps than chance has it.",
        why="Batches unlike the rest pull the weights to and fro and hide how training goes.",
        confirm="Find the steps in the evidence and their rows by train/batch. The same rows spike again in "
        "a run with another seed if they are the cause.",
        fix="Find the rows with pgs validate --all and pgs inspect, and take them out of data.dataset. "
        "preprocess.max_bad_rows_pct refuses sources with many broken rows, train.max_grad_norm: 1.0 bounds "
        "what one batch can do.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.loss_spike",
        title="A spike of the loss",
        meaning="The loss jumped once or twice, far beyond its recent noise.",
        why="One batch may have undone many steps; whether it did shows in the losses after it.",
        confirm="Look at the batch of that step (train/batch, in the evidence) and at which layers' "
        "gradients rose first (pgs report RUN).",
        fix="Look at the rows with pgs inspect. If they are in order: train.max_grad_norm: 1.0, or "
        "train.learning_rate: two thirds.",
        source="docs/alarms.md, The loss.",
    ),
    Entry(
        check="run.nonfinite",
        title="Loss or gradients are not finite",
        meaning="A loss or a gradient was NaN or infinite.",
        why="One such step puts NaN into every weight that it reaches, and NaN does not go away.",
        confirm="The event nonfinite names the step and the first layer. Run that batch alone, with "
        "torch.autograd.detect_anomaly.",
        fix="train.resume_from: a checkpoint from before the step; train.learning_rate: a third; "
        "train.max_grad_norm: 1.0; model.torch_dtype: float32.",
        source="docs/alarms.md, The loss.",
    ),
    Entry(
        check="run.nan_hidden",
        title="A clean loss over broken weights",
        meaning="Gradients are not finite to the end of the record while the loss shows clean numbers.",
        why="The curve that people watch says all is well while everything trained so far is lost.",
        confirm="Look for NaN in the parameters: any(p.isnan().any() for p in model.parameters()).",
        fix="train.resume_from: a checkpoint from before the step, with a third of train.learning_rate. pgs "
        "train records losses as they are; in a transformers Trainer set logging_nan_inf_filter=False.",
        source=_LIST,
    ),
    Entry(
        check="run.zero_loss_nan_norm",
        title="Loss 0.0 with a gradient norm of NaN",
        meaning="The recorded loss is exactly 0 while the gradient norm is not finite.",
        why="The zero stands for NaN: a filter replaced it. Training goes on without a model.",
        confirm="Switch the filter off (logging_nan_inf_filter=False) and run on: the loss says NaN.",
        fix="train.resume_from: a checkpoint from before the step, with a third of train.learning_rate.",
        source="transformers, TrainingArguments.logging_nan_inf_filter, which is on by default.",
    ),
    Entry(
        check="run.layer_imbalance",
        title="One block learns far faster than the rest",
        meaning="A block's gradient, against its weights, is ten or more times that of blocks like it, look "
        "after look.",
        why="A learning rate that suits this block is too low for the others, and the other way round.",
        confirm="Compare health/gw_ratio/<block> and, which is what counts with Adam, "
        "health/update_ratio/<block>.",
        fix="train.learning_rate: half, and train.optimizer: adamw, which evens out what gradients differ "
        "by. In a loop of your own give that block a parameter group with a lower learning rate.",
        source="The project's table of pathologies; docs/signals.md.",
    ),
    Entry(
        check="run.representation_collapse",
        title="A weight matrix collapses towards one direction",
        meaning="The stable rank of a matrix fell below its floor during this run.",
        why="All inputs are mapped onto nearly one direction: the model's outputs become repetitive.",
        confirm="health/stable_rank/<layer> against its first value; sample a few outputs.",
        fix="train.learning_rate: half, fewer train.epochs. Start from a checkpoint from before the fall.",
        source="The project's table of pathologies; docs/signals.md, Stable rank, says what it cannot tell.",
    ),
    Entry(
        check="run.forgetting",
        title="The weights have gone far from where they began",
        meaning="A layer's weights changed by more than half of their norm; or the evaluation loss of a "
        "source only ever went up while that of others did not.",
        why="What the model knew before is in those weights: tasks that are not trained on get worse.",
        confirm="Evaluate on general tasks before and after: give them as data.eval_sources. "
        "health/weight_drift/<layer> names the layers.",
        fix="train.learning_rate: half, fewer train.epochs, model.lora, or general text among data.sources "
        "with mode: pretrain.",
        source="The project's table of pathologies; Luo et al. 2023 measure forgetting in fine-tuning "
        "(arXiv 2308.08747).",
    ),
    Entry(
        check="run.source_overfitting",
        title="One source gets worse while others do not",
        meaning="The evaluation loss of one source rises for good after its lowest, that of others does not.",
        why="The mean over sources hides it. That source is either seen too often or pushed out by the "
        "others.",
        confirm="eval/<source>/loss for each source, and how often each was passed over.",
        fix="Its weight in data.sources: lower if it is small and often repeated, higher if it is forgotten.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.overfitting",
        title="The evaluation loss rises while the training loss falls",
        meaning="The evaluation loss has risen for good after its lowest, and the training loss kept "
        "falling.",
        why="The model learns its training rows by heart; what it does on others gets worse with each step.",
        confirm="eval/loss and eval/gap, which compares cross-entropy with cross-entropy.",
        fix="train.max_steps: the step of the lowest evaluation loss, or train.epochs: fewer. The best "
        "checkpoint is kept: use it. data.eval_every: smaller finds the step more exactly.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.entropy_collapse",
        title="The model has become too sure",
        meaning="The entropy of the model's outputs fell during the run to less than is needed to explore.",
        why="Reinforcement learning that follows can only choose among what the model still puts out.",
        confirm="health/output_entropy with its standard error (logging.rl_readiness: true).",
        fix="train.max_steps: a step from before the fall, or fewer train.epochs. logging.rl_entropy_floor "
        "with logging.stop_on: warning ends the run in time.",
        source="The project's table of pathologies; Cui et al. 2025, The Entropy Mechanism of Reinforcement "
        "Learning (arXiv 2505.22617).",
    ),
    Entry(
        check="run.lr_too_low",
        title="The loss is flat",
        meaning="Over at least 500 steps after the warm-up the loss surely changed by less than 3%, and "
        "evaluations did not improve.",
        why="The run costs what a run costs and the model stays what it was, unless it had nothing to learn.",
        confirm="health/weight_drift_max says how far the weights moved: 0 means that the optimizer holds "
        "other tensors. Otherwise a hundred steps with twice the learning rate should fall.",
        fix="train.learning_rate: twice what it is.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.memory_pressure",
        title="The device's memory is nearly full",
        meaning="More than 95% of the device's memory is in use, or the run ended because there was none "
        "left.",
        why="The next long batch ends the run; near the limit the allocator also slows training down.",
        confirm="health/cuda_utilization_pct_max and health/cuda_peak_gb; pgs profile --config FILE "
        "estimates the peak of a step.",
        fix="train.per_device_batch_size: half, train.gradient_accumulation_steps: twice; "
        "train.gradient_checkpointing: true; memory.loss_num_chunks: twice; data.max_seq_length: shorter.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.slow_throughput",
        title="Training is slower than the device allows",
        meaning="The device mostly waits, the speed falls over the run, or steps stall that are no longer "
        "than others.",
        why="The same result would cost a part of the time.",
        confirm="train/mfu, train/tokens_per_sec and train/step_time_s. A profiler over ten steps shows "
        "whether the device waits for data.",
        fix="data.num_workers: 4 where data is late; train.per_device_batch_size: twice where memory is "
        "free; model.compile: true.",
        source="The project's table of pathologies.",
    ),
    Entry(
        check="run.tracker_rows",
        title="Trackers may hold other rows than the record",
        meaning="The run was resumed from before its last recorded step, so that some steps have two rows.",
        why="A tracker keeps the first version, or drops the second: its curves are not those of the model "
        "that came out.",
        confirm="Compare train/loss of these steps in the tracker with pgs report RUN.",
        fix="Judge by the record; pgs sync RUN --to TRACKER sends what a tracker lacks.",
        source=_LIST,
    ),
)
